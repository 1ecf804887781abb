{{/*
Names, labels and the pod settings that operator and scheduler share. A component's templates pass
(dict "root" $ "component" "operator").
*/}}

{{- define "rlinf.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: the longest suffix must still make a DNS label (63). */}}
{{- define "rlinf.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "rlinf.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* With the namespace, as two releases of one name may live in two namespaces. */}}
{{- define "rlinf.clusterName" -}}
{{- printf "%s-%s" (include "rlinf.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "rlinf.selector" -}}
app.kubernetes.io/name: {{ include "rlinf.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The operator's pods as peers of the jobs' NetworkPolicies, in JSON. */}}
{{- define "rlinf.operatorPeers" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "rlinf.selector" (dict "root" . "component" "operator") | fromYaml) -}}
{{- list (dict "namespaceSelector" $namespace "podSelector" $pods) | toJson -}}
{{- end -}}

{{/* Who may scrape operator, scheduler and jobs, in JSON; where nobody is named, what the charts of Prometheus call so. */}}
{{- define "rlinf.scrapers" -}}
{{- $prometheus := dict "matchLabels" (dict "app.kubernetes.io/name" "prometheus") -}}
{{- .Values.networkPolicies.scrapeFrom | default (list (dict "namespaceSelector" dict "podSelector" $prometheus)) | toJson -}}
{{- end -}}

{{- define "rlinf.labels" -}}
{{- $own := dict "app.kubernetes.io/name" (include "rlinf.name" .root) "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_")) -}}
{{- if .component -}}
{{- $_ := set $own "app.kubernetes.io/component" .component -}}
{{- end -}}
{{- mustMergeOverwrite (dict) (.root.Values.commonLabels | default dict) $own | toYaml -}}
{{- end -}}

{{/* Without chart and version: an upgrade that changes neither image nor settings restarts no pod. */}}
{{- define "rlinf.podLabels" -}}
{{- $values := get .root.Values .component -}}
{{- mustMergeOverwrite (dict) (.root.Values.commonLabels | default dict) ($values.podLabels | default dict) (include "rlinf.selector" . | fromYaml) | toYaml -}}
{{- end -}}

{{- define "rlinf.serviceAccount" -}}
{{- $values := get .root.Values.serviceAccounts .component -}}
{{- if $values.name -}}
{{- $values.name -}}
{{- else if $values.create -}}
{{- printf "%s-%s" (include "rlinf.fullname" .root) .component -}}
{{- else -}}
{{- fail (printf "serviceAccounts.%s.create is false and its name is empty; name the ServiceAccount that exists" .component) -}}
{{- end -}}
{{- end -}}

{{- define "rlinf.image" -}}
{{- $name := include "rlinf.fromRegistry" (dict "root" . "image" .Values.image.repository) -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $name .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" NAME): with global.imageRegistry in front, unless it begins so. */}}
{{- define "rlinf.fromRegistry" -}}
{{- $registry := .root.Values.global.imageRegistry -}}
{{- if or (not $registry) (hasPrefix (printf "%s/" $registry) .image) -}}
{{- .image -}}
{{- else -}}
{{- printf "%s/%s" $registry .image -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" NAME "released" NAME): of jobs' pods; empty: the operator knows it. */}}
{{- define "rlinf.jobImage" -}}
{{- if or .image .root.Values.global.imageRegistry -}}
{{- $image := .image | default (printf "%s:%s" .released .root.Chart.AppVersion) -}}
{{- include "rlinf.fromRegistry" (dict "root" .root "image" $image) -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "template" TEMPLATE): changes the images of a pod template, which is a copy. */}}
{{- define "rlinf.templateFromRegistry" -}}
{{- $spec := .template.spec | default dict -}}
{{- range $container := concat ($spec.containers | default list) ($spec.initContainers | default list) -}}
{{- with $container.image -}}
{{- $_ := set $container "image" (include "rlinf.fromRegistry" (dict "root" $.root "image" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "spec" SPEC): likewise of an RLRuntime. */}}
{{- define "rlinf.runtimeFromRegistry" -}}
{{- $parts := list .spec (.spec.driver | default dict) (.spec.poolDefaults | default dict) -}}
{{- range $part := concat $parts (.spec.pools | default list) -}}
{{- include "rlinf.templateFromRegistry" (dict "root" $.root "template" ($part.template | default dict)) -}}
{{- with $part.image -}}
{{- $_ := set $part "image" (include "rlinf.fromRegistry" (dict "root" $.root "image" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* As rlinf_operator/access.py names them; one release per namespace. */}}
{{- define "rlinf.schedulerSecret" -}}rlinf-scheduler-tls{{- end -}}
{{- define "rlinf.caSecret" -}}rlinf-operator-ca{{- end -}}

{{- define "rlinf.schedulerAddress" -}}
{{- printf "%s-scheduler.%s.svc:%d" (include "rlinf.fullname" .) .Release.Namespace (include "rlinf.schedulerPort" . | int) -}}
{{- end -}}

{{/* Ports of our own processes. They are no values: whoever needs others has a Service in between. */}}
{{- define "rlinf.schedulerPort" -}}7080{{- end -}}
{{- define "rlinf.httpPort" -}}8080{{- end -}}

{{/* What Pod Security "restricted" wants, and a root file system that nobody can write to. */}}
{{- define "rlinf.podSecurity" -}}
runAsNonRoot: true
{{- if .Values.podSecurity.fixedIds }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "rlinf.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What a pod's place is decided by. */}}
{{- define "rlinf.placement" -}}
{{- $values := get .root.Values .component -}}
topologySpreadConstraints:
{{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    # Prefers, as a cluster may have one node.
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "rlinf.selector" . | nindent 8 }}
    # Counts the pods of the new version alone during a rollout.
    matchLabelKeys: [pod-template-hash]
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A leader that is killed as it stops gives no Lease back. 8 is what process.py has for stop_timeout_s. */}}
{{- define "rlinf.operatorGrace" -}}
{{- $stop := .Values.operator.settings.stop_timeout_s | default 8 -}}
{{- if le (float64 .Values.operator.terminationGracePeriodSeconds) (float64 $stop) -}}
{{- fail (printf "operator.terminationGracePeriodSeconds is %s, and a stop may take %s s (operator.settings.stop_timeout_s); raise the first, to 10 more at best" (include "rlinf.plain" .Values.operator.terminationGracePeriodSeconds) (include "rlinf.plain" $stop)) -}}
{{- end -}}
{{- include "rlinf.plain" .Values.operator.terminationGracePeriodSeconds -}}
{{- end -}}

{{/* Peers that stand for the namespaces whose jobs are run. */}}
{{- define "rlinf.jobNamespaces" -}}
{{- if .Values.watchNamespaceSelector -}}
{{- toYaml .Values.watchNamespaceSelector -}}
{{- else if .Values.watchNamespaces -}}
matchExpressions:
  - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson .Values.watchNamespaces }}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* The same as text, as in `kubectl get namespaces --selector`; empty: all, or those that are listed. */}}
{{- define "rlinf.namespaceSelector" -}}
{{- if and .Values.watchNamespaces .Values.watchNamespaceSelector -}}
{{- fail "watchNamespaces and watchNamespaceSelector are both set; remove one" -}}
{{- end -}}
{{- $said := list -}}
{{- range $key, $value := .Values.watchNamespaceSelector.matchLabels -}}
{{- $said = append $said (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- range .Values.watchNamespaceSelector.matchExpressions -}}
{{- if eq .operator "Exists" -}}
{{- $said = append $said .key -}}
{{- else if eq .operator "DoesNotExist" -}}
{{- $said = append $said (printf "!%s" .key) -}}
{{- else -}}
{{- $said = append $said (printf "%s %s (%s)" .key (lower .operator) (join "," .values)) -}}
{{- end -}}
{{- end -}}
{{- join "," $said -}}
{{- end -}}

{{/* A number without an exponent: values come as floats, and Go writes 2592000 as 2.592e+06. */}}
{{- define "rlinf.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}
