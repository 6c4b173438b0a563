# needs: pip aider-chat>=0.86,<1
# aider. When the context is full it says so and shows an account of the chat's tokens.
source "$(dirname "$0")/../shared/checks.sh"
export OPENAI_API_BASE="$OPENAI_BASE_URL"
cat > metadata.json <<END
{"openai/$COMPAT_MODEL": {
  "max_input_tokens": $COMPAT_CONTEXT, "max_output_tokens": 4096, "input_cost_per_token": 0, "output_cost_per_token": 0,
  "litellm_provider": "openai", "mode": "chat", "supports_vision": true
}}
END
chat() {
    aider --model "openai/$COMPAT_MODEL" --model-metadata-file metadata.json --edit-format ask --no-git --yes-always \
        --no-check-update --analytics-disable --no-show-release-notes --no-gitignore --no-pretty "$@"
}
ask() { chat "$@" </dev/null; }
twice() { printf 'Hi\nAnd now?\n' | chat | tr '\n' ' '; }

# Each of its requests has an earlier answer of its own, "Ok.", also behind a picture.
check text 'Hello again.' ask --no-stream --message Hi
check image 'I see a picture.' ask --message 'What is in the picture?' "$COMPAT_IMAGE"
check stream 'Hello again.' ask --stream --message Hi
check turns 'Hello again.*Hello again.' twice
echo 'tool: n/a aider has no tools'
check context 'has hit a token limit' ask --message-file "$COMPAT_LONG"
