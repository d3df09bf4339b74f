{{/* The version in an image's tag, as in 0.1.0 for v0.1.0-cu13; "" for a digest, or a tag that is no version. */}}
{{- define "image.version" -}}
{{- $tag := regexFind ":[^:/@]+$" (regexReplaceAll "@.*$" . "") -}}
{{- regexFind "[0-9]+[.][0-9]+[.][0-9]+" (regexFind "^:v?[0-9]+[.][0-9]+[.][0-9]+([-_+].*)?$" $tag) -}}
{{- end -}}

{{/* Fails unless trainer and rollout image are of one release: they exchange messages and share NCCL and Ray. */}}
{{- define "images.check" -}}
{{- $trainer := include "image.version" .Values.images.trainer -}}
{{- $rollout := include "image.version" .Values.images.rollout -}}
{{- if and $trainer $rollout (ne $trainer $rollout) -}}
{{- fail (printf "images.trainer is %s, images.rollout is %s: versions %s and %s differ, and the images of one release belong together. Set both to the same version (a digest, or a tag that is no version, is not compared)" .Values.images.trainer .Values.images.rollout $trainer $rollout) -}}
{{- end -}}
{{- end -}}
