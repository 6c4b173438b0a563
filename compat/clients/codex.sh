# needs: npm @openai/codex@^0
# Codex CLI, over responses. It sends every request as a stream. When the context is full it shows a text of its own.
source "$(dirname "$0")/../shared/checks.sh"
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<END
model = "$COMPAT_MODEL"
model_provider = "triptych"
model_context_window = $COMPAT_CONTEXT
[model_providers.triptych]
name = "Triptych"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_max_retries = 0
END
run() { codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$@"; }
ask() { run "$@" </dev/null; }

check text 'Hello from Triptych.' ask Hi
check image 'I see a picture.' ask -i "$COMPAT_IMAGE" -- 'What is it?'
check stream '"text":"Hello from Triptych."' ask --json Hi
check turns 'Hello again.' ask resume --last 'And now?'
check tool 'The tool answered.' ask 'What is the weather?'
check context 'ran out of room in the model.s context window' run - <"$COMPAT_LONG"
