# needs: npm cline@^3
# Cline's CLI, over chat completions, always as a stream. When the context is full it shows the service's error.
source "$(dirname "$0")/../shared/checks.sh"
export AI_SDK_LOG_WARNINGS=false
cline auth openai-compatible -k "$OPENAI_API_KEY" -b "$OPENAI_BASE_URL" -m "$COMPAT_MODEL" >/dev/null
# a prompt is at least two words
ask() { timeout -k 5 100 cline "$@"; }
overflow() { ask "Hi there $(cat "$COMPAT_LONG")"; }

check text 'Hello from Triptych.' ask 'Hi there' </dev/null
echo 'turns: n/a it resumes a session in its terminal UI alone'
check stream '"Hello"\|" from Triptych."' ask --json 'Hi there' </dev/null
check image 'I see a picture.' ask "What is it? @$COMPAT_IMAGE" </dev/null
check tool 'The tool answered.' ask 'What is the weather?' </dev/null
check context 'maximum context length is' overflow </dev/null
