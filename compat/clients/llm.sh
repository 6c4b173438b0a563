# needs: pip llm>=0.27,<1
# The command llm. When the context is full it shows the service's error, which names the context's length.
source "$(dirname "$0")/../shared/checks.sh"
export LLM_USER_PATH="$HOME/llm"
mkdir "$LLM_USER_PATH"
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: triptych
  model_name: $COMPAT_MODEL
  api_base: $OPENAI_BASE_URL
  vision: true
  supports_tools: true
END
cat > tools.py <<END
def get_weather(city: str) -> str:
    "The weather of a city"
    return "sunny"
END
ask() { llm -m triptych "$@"; }

check text 'Hello from Triptych.' ask --no-stream Hi </dev/null
check image 'I see a picture.' ask 'What is it?' --attachment "$COMPAT_IMAGE" </dev/null
check stream 'Hello from Triptych.' ask Hi </dev/null
check turns 'Hello again.' ask --continue 'And now?' </dev/null
check tool 'The tool answered.' ask --functions tools.py 'What is the weather?' </dev/null
check context "maximum context length is $COMPAT_CONTEXT tokens" ask <"$COMPAT_LONG"
