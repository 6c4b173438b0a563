{{/* The pod of an instance: metadata and spec. Takes root, role. */}}
{{- define "triptych.instance" -}}
{{- $ := .root }}
{{- $shape := include "triptych.role" . | fromYaml }}
{{- $component := dict "root" $ "component" (lower .role) }}
{{- $image := printf "%s:%s" $.Values.image.worker ($.Values.image.tag | default $.Chart.AppVersion) }}
{{- $pod := dict "root" $ "image" $image "shape" $shape "isFrontend" false "graceSeconds" (add $.Values.drainSeconds 15) }}
{{- $startSeconds := include "triptych.startSeconds" $ | int }}
{{- $probeSeconds := 5 -}}
metadata:
  labels: {{- include "triptych.podSelector" $component | nindent 4 }}
  {{- with $.Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "triptych.pod" $pod | nindent 2 }}
  topologySpreadConstraints: {{- include "triptych.spread" $component | nindent 4 }}
  containers:
    - name: instance
      args:
        - serve
        - {{ $.Values.model.path }}
        - --role={{ .role }}
        - --name=$(POD_NAME)
        - --join={{ include "triptych.join" $ }}
        - --cluster-host=$(POD_IP)
        - --cluster-secret-file=/secrets/secret
        - --health-port={{ $.Values.healthPort }}
        - --drain-timeout={{ $.Values.drainSeconds }}
        - --start-timeout={{ $startSeconds }}
        - --fabric={{ $.Values.fabric }}
        - --dtype={{ $.Values.dtype }}
        - --device={{ ternary "cuda" "cpu" (gt (int $shape.gpus) 0) }}
        - --threads={{ $shape.threads }}
        {{- with $shape.kvCacheMemory }}
        - --kv-cache-memory={{ . }}
        {{- end }}
        {{- range $shape.args }}
        - {{ . | quote }}
        {{- end }}
      ports:
        - {name: health, containerPort: {{ $.Values.healthPort }}}
      # ready once a frontend has it, so this takes as long as loading and waiting for a frontend: after that, the
      # process says what it has waited for, and ends
      startupProbe:
        httpGet: {path: /ready, port: health}
        periodSeconds: {{ $probeSeconds }}
        failureThreshold: {{ add 6 (div (mul 2 $startSeconds) $probeSeconds) }}
      readinessProbe:
        httpGet: {path: /ready, port: health}
        periodSeconds: 5
        timeoutSeconds: 3
      livenessProbe:
        httpGet: {path: /health, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
      resources:
        {{- $resources := deepCopy $shape.resources }}
        {{- if gt (int $shape.gpus) 0 }}
        {{- $resources = mergeOverwrite $resources (dict "limits" (dict $shape.gpuResource (int $shape.gpus))) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      {{- include "triptych.container" $pod | nindent 6 }}
{{- end }}
