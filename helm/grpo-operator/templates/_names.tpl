{{/* Name of the operator's objects, and the prefix of names of others. */}}
{{- define "grpo.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}
