# needs: npm opencode-ai@^1
# opencode, over chat completions. When the context is full it makes a summary of the conversation, and goes on with it.
source "$(dirname "$0")/../shared/checks.sh"
cat > opencode.json <<END
{
  "autoupdate": false,
  "share": "disabled",
  "provider": {"triptych": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
    "models": {"$COMPAT_MODEL": {
      "attachment": true,
      "tool_call": true,
      "modalities": {"input": ["text", "image"], "output": ["text"]},
      "limit": {"context": $COMPAT_CONTEXT, "output": 1024}
    }}
  }}
}
END
ask() { timeout -k 5 400 opencode run --model "triptych/$COMPAT_MODEL" "$@"; }
# The text has a token per character: each message fits into the context, both don't.
overflow() {
    head -c 30000 "$COMPAT_LONG" | ask
    head -c 20000 "$COMPAT_LONG" | ask --continue --format json | tr -d '\n'
}

check text 'Hello from Triptych.' ask Hi </dev/null
check image 'I see a picture.' ask 'What is it?' --file "$COMPAT_IMAGE" </dev/null
check stream '"text":"Hello from Triptych."' ask --format json Hi </dev/null
check turns 'Hello again.' ask --continue 'And now?' </dev/null
check tool 'The tool answered.' ask 'What is the weather?' </dev/null
check context 'ContextOverflowError.*"text":"Hello again."' overflow
