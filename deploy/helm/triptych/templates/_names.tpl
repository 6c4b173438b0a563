{{/* Names and labels. Every object of a release starts with its name; a pod's component is frontend or its role. */}}

{{- define "triptych.name" -}}
{{- if contains "triptych" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-triptych" (.Release.Name | trunc 31 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "triptych.selector" -}}
app.kubernetes.io/name: triptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "triptych.labels" -}}
{{ include "triptych.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels that a pod keeps over upgrades. Takes root and component. */}}
{{- define "triptych.podSelector" -}}
{{ include "triptych.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "triptych.podLabels" -}}
{{ include "triptych.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "triptych.secretName" -}}
{{ .Values.secret.existing | default (printf "%s-secret" (include "triptych.name" .)) }}
{{- end }}

{{/* What clients and probes of the frontends use: https or http. */}}
{{- define "triptych.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.existing "") }}
{{- end }}

{{- define "triptych.servicePort" -}}
{{ .Values.frontend.service.port | default (ternary 443 80 (ne .Values.tls.existing "")) }}
{{- end }}

{{/* Seconds that loading may take. */}}
{{- define "triptych.startSeconds" -}}
{{ add .Values.model.baseSeconds (ceil (mulf .Values.model.gibibytes .Values.model.secondsPerGibibyte)) }}
{{- end }}

{{/* Control addresses of all frontends. Each pod of the StatefulSet has a name, which stands for it alone. */}}
{{- define "triptych.join" -}}
{{- $name := printf "%s-frontend" (include "triptych.name" .) }}
{{- $addresses := list }}
{{- range until (int .Values.frontend.replicas) }}
{{- $addresses = append $addresses (printf "%s-%d.%s:8001" $name . $name) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{/* A role with the defaults of those fields that it doesn't set. Takes root and role; returns YAML. */}}
{{- define "triptych.role" -}}
{{- $role := index .root.Values.roles .role | default dict }}
{{- range $field, $value := .root.Values.roleDefaults }}
{{- if not (hasKey $role $field) }}{{ $role = set (deepCopy $role) $field $value }}{{ end }}
{{- end }}
{{- toYaml $role }}
{{- end }}
