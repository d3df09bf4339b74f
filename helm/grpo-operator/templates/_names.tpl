{{/* Name of the operator's objects, and the prefix of names of others. */}}
{{- define "grpo.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}
{{/* Namespaces that the operator watches, as a JSON list; none means all. */}}
{{- define "grpo.namespaces" -}}
{{- if and .Values.allNamespaces .Values.watchNamespaces -}}
{{- fail (printf "allNamespaces is true, and watchNamespaces is [%s]: set one of the two" (join ", " .Values.watchNamespaces)) -}}
{{- end -}}
{{- if .Values.allNamespaces }}[]{{ else }}{{ .Values.watchNamespaces | default (list .Release.Namespace) | uniq | sortAlpha | toJson }}{{ end -}}
{{- end -}}
{{/* Fails in an upgrade that would leave the jobs of other namespaces alone because of a default. */}}
{{- define "grpo.namespacesCheck" -}}
{{- if and .Release.IsUpgrade (not .Values.allNamespaces) (not .Values.watchNamespaces) -}}
{{- $before := lookup "apps/v1" "Deployment" .Release.Namespace (include "grpo.fullname" .) -}}
{{- range dig "spec" "template" "spec" "containers" list $before -}}
{{- if has "--all-namespaces" .args -}}
{{- fail (printf "the operator has watched all namespaces, and by default it now watches %s only: set allNamespaces=true to keep all, or watchNamespaces={%s}" $.Release.Namespace $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
