# Completion of pydtnn's commands in bash 3.2 or newer, see docs/running.md. Each line of the table
# is COMMAND|NAME|KIND|VALUES|DESCRIPTION: the kinds are those of pydtnn/tools/completion.py.

_pydtnn_table=@TABLE@

_pydtnn() {
    local line=${COMP_LINE:0:COMP_POINT} words args path next option value where name kind values help
    local i n
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    n=${#words[@]}
    local word=${words[n - 1]} before=${words[n - 2]-}
    for ((i = 0; i < n - 1; i++)); do
        case ${words[i]##*/} in
            pydtnn) args=("${words[@]:i+1}") && break ;;
            pydtnn-train | pydtnn-trace) args=("${words[i]##*-}" "${words[@]:i+1}") && break ;;
        esac
        if [[ ${words[i]} == -m && ${words[i + 1]} == pydtnn && i -lt n-2 ]]; then
            args=("${words[@]:i+2}") && break
        elif [[ ${words[i]} == -m && ${words[i + 1]} == pydtnn.* && i -lt n-2 ]]; then
            args=("${words[i + 1]#pydtnn.}" "${words[@]:i+2}") && break
        fi
    done
    if ((${#args[@]} == 0)); then
        if [[ $before == -m && -n $word && pydtnn == "${word:0:6}"* ]]; then
            while IFS='|' read -r where name kind values help; do
                [[ -z $where && $name != completion ]] && COMPREPLY+=("pydtnn.$name")
            done <<<"$_pydtnn_table"
            COMPREPLY=($(compgen -W "pydtnn ${COMPREPLY[*]}" -- "$word"))
        else
            _pydtnn_other "$@"
        fi
        return
    fi
    type compopt &>/dev/null && compopt +o default +o bashdefault
    for ((i = 0; i < ${#args[@]} - 1; i++)); do
        next=${path:+$path }${args[i]}
        [[ $'\n'$_pydtnn_table == *$'\n'"$next|"* ]] || break
        path=$next
    done
    n=${#args[@]}
    ((n > 1)) && option=${args[n - 2]} value=$word || option='' value=$word
    [[ $word == --*=* ]] && option=${word%%=*} value=${word#*=}
    local names=() chosen='' offered=''
    while IFS='|' read -r where name kind values help; do
        [[ $where == "$path" ]] || continue
        case $name in
            "$option") [[ $kind != [-\>] ]] && chosen="$kind|$values" ;;
            '*') offered="$kind|$values" ;;
        esac
        [[ $name == -* && $word == -* ]] || [[ $kind == '>' ]] && names+=("$name")
    done <<<"$_pydtnn_table"
    if [[ -n $chosen && ($word != -* || $word == --*=*) ]]; then
        _pydtnn_reply "$chosen" "$value"
    elif [[ ${#names[@]} -gt 0 || $word == -* ]]; then
        COMPREPLY=($(compgen -W "${names[*]}" -- "$word"))
    else
        _pydtnn_reply "$offered" "$value"
    fi
    # bash replaces the part of the word behind the last of these characters
    local kept=${value%"${value##*:}"}
    [[ $COMP_WORDBREAKS == *:* ]] && COMPREPLY=("${COMPREPLY[@]#"$kept"}")
    [[ $word == --*=* && $COMP_WORDBREAKS != *=* ]] && COMPREPLY=("${COMPREPLY[@]/#/$option=}")
}

_pydtnn_reply() {  # "KIND|VALUES" and the beginning of a value
    local kind=${1%%|*} values=${1#*|} value=$2 last=${2##*,} run IFS=$' \n'
    case $kind in
        c | v) COMPREPLY=($(compgen -W "$values" -- "$value")) ;;
        l) COMPREPLY=($(compgen -P "${value%"$last"}" -W "$values" -- "$last")) ;;
        r)
            for run in runs/*/; do
                [[ $run == "$value"* && -e ${run}run.json ]] && COMPREPLY+=("${run%/}")
            done
            ;;
    esac
    ((${#COMPREPLY[@]})) && return
    IFS=$'\n'
    case $kind in
        f | v | l) COMPREPLY=($(compgen -f -- "$value")) ;;
        d | r) COMPREPLY=($(compgen -d -- "$value")) ;;
    esac
    type compopt &>/dev/null && compopt -o filenames
}

_pydtnn_other() {  # python, mpirun and others without pydtnn: the completion that they have
    local load found
    for load in _comp_load __load_completion; do
        declare -F "$load" >/dev/null && "$load" "$1" 2>/dev/null
        found=$(complete -p "$1" 2>/dev/null) && [[ $found != *" -F _pydtnn "* ]] && break
    done
    complete -o bashdefault -o default -F _pydtnn "$1"
    [[ $found == *" -F "* ]] && found=${found##*-F } && found=${found%% *}
    [[ -n $found && $found != *_pydtnn* ]] && declare -F "$found" >/dev/null && "$found" "$@"
}

complete -o bashdefault -o default -F _pydtnn \
    pydtnn pydtnn-train pydtnn-trace python python3 mpirun mpiexec srun
