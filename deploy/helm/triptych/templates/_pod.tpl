{{/* What all pods share. */}}

{{/* Takes root, image, isFrontend, shape (tmpSize, shmSize, nodeSelector, tolerations, affinity, runtimeClassName), graceSeconds. */}}
{{- define "triptych.pod" -}}
{{- $ := .root -}}
serviceAccountName: {{ include "triptych.name" $ }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
securityContext:
  {{- toYaml (merge (deepCopy $.Values.podSecurity) (include "triptych.podSecurity" $ | fromYaml)) | nindent 2 }}
{{- with $.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .shape.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .shape.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .shape.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .shape.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: secrets
    projected:
      defaultMode: 0400  # fsGroup adds its group
      sources:
        - secret: {name: {{ include "triptych.secretName" $ }}, items: [{key: secret, path: secret}]}
        {{- if and .isFrontend $.Values.apiKeys.existing }}
        - secret: {name: {{ $.Values.apiKeys.existing }}, items: [{key: keys, path: keys}]}
        {{- end }}
        {{- if and .isFrontend $.Values.tls.existing }}
        - secret: {name: {{ $.Values.tls.existing }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
        {{- end }}
  - name: tmp
    emptyDir: {sizeLimit: {{ .shape.tmpSize }}}
  {{- with .shape.shmSize }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ . }}}
  {{- end }}
  - name: cache
    {{- toYaml ($.Values.cache | default (dict "emptyDir" (dict "sizeLimit" "1Gi"))) | nindent 4 }}
  {{- with $.Values.model.volume }}
  - name: models
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "triptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "triptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The rest of a container that runs triptych. Takes root, image, shape (env, shmSize). */}}
{{- define "triptych.container" -}}
{{- $ := .root -}}
image: {{ .image }}
imagePullPolicy: {{ $.Values.image.pullPolicy }}
command: [triptych]
env:
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: HOME, value: /tmp}
  - {name: XDG_CACHE_HOME, value: /cache}
  {{- with .shape.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext: {{- include "triptych.containerSecurity" $ | nindent 2 }}
volumeMounts:
  - {name: secrets, mountPath: /secrets, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .shape.shmSize }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  - {name: cache, mountPath: /cache}
  {{- if $.Values.model.volume }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
{{- end }}

{{- define "triptych.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "triptych.podSelector" . | nindent 6 }}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "triptych.podSelector" . | nindent 6 }}
{{- end }}
