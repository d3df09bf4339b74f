{{/* The version in an image's tag, as in 0.1.0 for v0.1.0-cu13; "" for a digest, or a tag that is no version. */}}
{{- define "image.version" -}}
{{- $tag := regexFind ":[^:/@]+$" (regexReplaceAll "@.*$" . "") -}}
{{- regexFind "[0-9]+[.][0-9]+[.][0-9]+" (regexFind "^:v?[0-9]+[.][0-9]+[.][0-9]+([-_+].*)?$" $tag) -}}
{{- end -}}

{{/* An image of the jobs as pods get it: a name without tag or digest gets the chart's version. Takes (list NAME $). */}}
{{- define "image.complete" -}}
{{- $name := index . 0 -}}
{{- $name }}{{ if not (regexMatch "[:@][^/]*$" $name) }}:{{ (index . 1).Chart.AppVersion }}{{ end -}}
{{- end -}}

{{/* The operator's own image. */}}
{{- define "image.operator" -}}
{{- $image := .Values.image -}}
{{- $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}{{ with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Fails unless trainer and rollout image are of one release: they exchange messages and share NCCL and Ray. */}}
{{- define "images.check" -}}
{{- $trainer := include "image.complete" (list .Values.images.trainer .) -}}
{{- $rollout := include "image.complete" (list .Values.images.rollout .) -}}
{{- $versions := list (include "image.version" $trainer) (include "image.version" $rollout) -}}
{{- if and (index $versions 0) (index $versions 1) (ne (index $versions 0) (index $versions 1)) -}}
{{- fail (printf "images.trainer is %s, images.rollout is %s: versions %s and %s differ, and the images of one release belong together. Set both to the same version (a digest, or a tag that is no version, is not compared)" $trainer $rollout (index $versions 0) (index $versions 1)) -}}
{{- end -}}
{{- end -}}
