# What the CLI clients share. The runner's settings are in the environment: COMPAT_URL, COMPAT_MODEL, …

# check NAME EXPECTED COMMAND…: runs COMMAND and says whether its output contains EXPECTED (a basic regular expression)
check() {
    local name=$1 expected=$2 output
    shift 2
    output=$("$@" 2>&1)
    if grep -q -- "$expected" <<<"$output"; then
        echo "$name: ok"
    else
        echo "$name: failed $(tr -s '[:space:]' ' ' <<<"$output" | tail -c 300)"
    fi
}
