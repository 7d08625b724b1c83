# Completion of pydtnn's commands in zsh, see docs/running.md. Each line of the table is
# COMMAND|NAME|KIND|VALUES|DESCRIPTION: the kinds are those of pydtnn/tools/completion.py.

_pydtnn_table=@TABLE@

_pydtnn() {
    local -a args names run row
    local line where option chosen offered word=${words[CURRENT]} before=${words[CURRENT-1]}
    local -i i
    for ((i = 1; i < CURRENT; i++)); do
        case ${words[i]:t} in
            pydtnn) args=("${(@)words[i+1,CURRENT]}"); break ;;
            pydtnn-train|pydtnn-trace) args=("${words[i]##*-}" "${(@)words[i+1,CURRENT]}"); break ;;
        esac
        if [[ ${words[i]} == -m && i+1 -lt CURRENT ]]; then
            case ${words[i+1]} in
                pydtnn) args=("${(@)words[i+2,CURRENT]}"); break ;;
                pydtnn.*) args=("${words[i+1]#pydtnn.}" "${(@)words[i+2,CURRENT]}"); break ;;
            esac
        fi
    done
    if (( ! $#args )); then
        if [[ $before == -m && -n $word && pydtnn == ${word[1,6]}* ]]; then
            for line in ${(f)_pydtnn_table}; do
                row=("${(@s:|:)line}")
                [[ -z $row[1] && $row[2] != completion ]] && names+=("pydtnn.$row[2]:$row[5]")
            done
            _describe module names
        elif [[ -n ${_pydtnn_before[$service]} ]]; then
            ${=_pydtnn_before[$service]}
        else
            _default
        fi
        return
    fi
    for ((i = 1; i < $#args; i++)); do
        [[ $'\n'$_pydtnn_table == *$'\n'"${where:+$where }$args[i]|"* ]] || break
        where=${where:+$where }$args[i]
    done
    (( $#args > 1 )) && option=$args[-2]
    [[ $word == --*=* ]] && option=${word%%=*}
    for line in ${(f)_pydtnn_table}; do
        row=("${(@s:|:)line}")
        [[ $row[1] == $where ]] || continue
        if [[ $row[2] == $option && $row[3] != [-\>] ]]; then
            chosen="$row[3]|$row[4]"
        elif [[ $row[2] == '*' ]]; then
            offered="$row[3]|$row[4]"
        fi
        [[ $row[2] == -* && $word == -* || $row[3] == '>' ]] && names+=("$row[2]:$row[5]")
    done
    if [[ $word == --*=* ]]; then
        compset -P '*='
        _pydtnn_values "$chosen"
    elif [[ -n $chosen && $word != -* ]]; then
        _pydtnn_values "$chosen"
    elif (( $#names )); then
        _describe option names
    else
        _pydtnn_values "$offered"
    fi
}

_pydtnn_values() {  # "KIND|VALUES"
    local kind=${1%%|*} given=$PREFIX
    local -a values=(${=1#*|})
    case $kind in
        c) compadd -a values ;;
        v) compadd -a values || _files ;;
        l)
            compset -P '*,'
            compadd -S '' -a values || _files
            ;;
        r)
            values=(runs/*/run.json(N:h))
            compadd -a values || _files -/
            ;;
        f) _files ;;
        d) _files -/ ;;
    esac
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
typeset -gA _pydtnn_before
() {
    local name
    for name in python python3 mpirun mpiexec srun; do
        [[ ${_comps[$name]} != _pydtnn ]] && _pydtnn_before[$name]=${_comps[$name]}
    done
}
compdef _pydtnn pydtnn pydtnn-train pydtnn-trace python python3 mpirun mpiexec srun
