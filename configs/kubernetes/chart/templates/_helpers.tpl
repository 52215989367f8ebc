{{- define "evenkeel.selector" -}}
app.kubernetes.io/name: evenkeel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "evenkeel.labels" -}}
{{ include "evenkeel.selector" . }}
app.kubernetes.io/part-of: evenkeel
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The names that the StatefulSet gives its pods. */}}
{{- define "evenkeel.members" -}}
{{- range $i := until (int .Values.replicas) }}{{ if $i }}, {{ end }}{{ $.Release.Name }}-{{ $i }}{{ end }}
{{- end }}
