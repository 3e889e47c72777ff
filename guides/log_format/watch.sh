case $(sed -E 's/^\[[^]]*\]:? ?//' "$1" |
    grep -E '^(epoch=|end: |stopped as|(error: )?stuck for|ranks? [0-9].* (killed|ended)|error: )' | tail -n 1) in
"end: "*" code 0") echo finished ;;
"end: "*" code 130") echo a person stopped it ;;
"end: "*" code "[456] | "end: "*" code 1"?? | "stopped as"* | "rank"* | *" lost contact "*) echo start it again ;;
*"stuck for"*) echo it hangs ;;
epoch=*) if find "$1" -mmin +10 | grep -q .; then echo silent; else echo it moves; fi ;;
*) echo "no progress: read $1" ;; esac
