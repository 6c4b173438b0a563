# needs: npm @anthropic-ai/claude-code@^2
# Claude Code, over Anthropic's /v1/messages. When the context is full it shows that error's own words, or its text for them.
source "$(dirname "$0")/../shared/checks.sh"
export ANTHROPIC_MODEL="$COMPAT_MODEL" ANTHROPIC_SMALL_FAST_MODEL="$COMPAT_MODEL"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_RETRIES=0 DISABLE_AUTO_COMPACT=1
export CLAUDE_CODE_MAX_OUTPUT_TOKENS=4096 # beside its instructions in the context
ask() { claude -p --allowed-tools=Bash "$@"; }
message() {
    printf '{"type": "user", "message": {"role": "user", "content": [{"type": "image", "source":
        {"type": "base64", "media_type": "image/png", "data": "%s"}}]}}' "$(base64 -w0 "$COMPAT_IMAGE")" | tr -d '\n'
    echo
}
events=(--output-format stream-json --verbose)

check text 'Hello from Triptych.' ask Hi </dev/null
check image 'I see a picture.' ask --input-format stream-json "${events[@]}" < <(message)
check stream 'text_delta","text":" from\|text_delta","text":"Hello' ask "${events[@]}" --include-partial-messages Hi </dev/null
check turns 'Hello again.' ask --continue 'And now?' </dev/null
check tool 'The tool answered.' ask 'What is the weather?' </dev/null
check context 'Prompt is too long' ask <"$COMPAT_LONG"
