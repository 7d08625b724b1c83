# Completion of pydtnn's commands in fish, see docs/running.md. Each line of the table is
# COMMAND|NAME|KIND|VALUES|DESCRIPTION: the kinds are those of pydtnn/tools/completion.py.

set -g __pydtnn_table (string split \n -- @TABLE@)

# Print the arguments of pydtnn before the cursor, the name of the command first.
function __pydtnn_arguments
    set -l words (commandline -opc)
    for i in (seq (count $words))
        set -l rest $words[(math $i + 1)..]
        switch (path basename -- $words[$i])
            case pydtnn
                printf '%s\n' '' $rest
                return 0
            case pydtnn-train pydtnn-trace
                printf '%s\n' '' (string replace -r '.*-' '' -- $words[$i]) $rest
                return 0
        end
        if test "$words[$i]" = -m
            switch "$rest[1]"
                case pydtnn
                    printf '%s\n' '' $rest[2..]
                    return 0
                case 'pydtnn.*'
                    printf '%s\n' '' (string replace pydtnn. '' -- $rest[1]) $rest[2..]
                    return 0
            end
        end
    end
    return 1
end

function __pydtnn_present
    __pydtnn_arguments >/dev/null
end

function __pydtnn_modules
    set -l found (string replace -rf '^\|([^|]*)\|>\|\|(.*)$' 'pydtnn.$1\t$2' -- $__pydtnn_table)
    string match -v -- 'pydtnn.completion*' $found
end

function __pydtnn_complete
    set -l arguments (__pydtnn_arguments)
    set -l word (commandline -ct)
    set -l where
    for argument in $arguments[2..]
        set -l next (string join ' ' -- $where $argument)
        string match -q -- "$next|*" $__pydtnn_table || break
        set where $next
    end
    set -l rows (string match -- "$where|*" $__pydtnn_table)
    set -l option $arguments[-1]
    string match -q -- '--*=*' $word && set option (string replace -r '=.*' '' -- $word)
    set -l chosen
    test (count $arguments) -gt 1 -o (string sub -l 1 -- "$word") = - 2>/dev/null
    and set chosen (string match -r -- '^[^|]*\|'(string escape --style=regex -- "$option")'\|[^->].*' $rows)
    if test -n "$chosen[1]"; and string match -qv -- '-*' "$word"; or string match -q -- '--*=*' $word
        __pydtnn_values "$chosen[1]" $word
        return
    end
    if string match -q -- '-*' "$word"
        string replace -rf '^[^|]*\|(-[^|]*)\|[^|]*\|[^|]*\|(.*)$' '$1\t$2' -- $rows
        return
    end
    set -l commands (string replace -rf '^[^|]*\|([^|]*)\|>\|\|(.*)$' '$1\t$2' -- $rows)
    if test (count $commands) -gt 0
        printf '%s\n' $commands
    else
        __pydtnn_values (string match -- "$where|\*|*" $rows)[-1] $word
    end
end

function __pydtnn_values -a row word
    set -l parts (string split '|' -- $row)
    set -l prefix (string match -r -- '^--[^=]*=' "$word")
    set -l value (string replace -r -- '^--[^=]*=' '' "$word")
    set -l values
    switch "$parts[3]"
        case c v
            set values (string split -n ' ' -- $parts[4])
        case l
            set prefix "$prefix"(string replace -r -- '[^,]*$' '' "$value")
            set values (string split -n ' ' -- $parts[4])
        case r
            set values (path dirname -- runs/*/run.json)
    end
    if test (count $values) -gt 0
        printf '%s\n' "$prefix"$values
        test "$parts[3]" = v; or return
    end
    switch "$parts[3]"
        case f v l
            __fish_complete_path $value
        case d r
            __fish_complete_directories $value
    end
end

for program in pydtnn pydtnn-train pydtnn-trace
    complete -c $program -f -a '(__pydtnn_complete)'
end
for program in python python3 mpirun mpiexec srun
    complete -c $program -n __pydtnn_present -f -a '(__pydtnn_complete)'
end
for program in python python3
    complete -c $program -s m -x -a '(__pydtnn_modules)'
end
