{{- define "vecd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "vecd.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "vecd.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "vecd.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "vecd.serviceAccount" -}}
{{- default (ternary (include "vecd.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "vecd.selector" -}}
app.kubernetes.io/name: {{ include "vecd.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "vecd.labels" -}}
{{ include "vecd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Sets what a pool says over what the release says: (list TO FROM). The chart's own objects are merged key by key;
     lists and Kubernetes' own objects (resources, nodeSelector, …) are replaced. Helm's mergeOverwrite would take 0,
     false and "" for absent. */}}
{{- define "vecd.override" -}}
{{- $merged := list "image" "envVars" "podAnnotations" "podLabels" "persistence" "autoscaling" "scaleUp" "scaleDown" "keda" "hpa" }}
{{- $to := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- if and (has $key $merged) (kindIs "map" $value) }}
{{- include "vecd.override" (list (get $to $key) $value) }}
{{- else }}
{{- $_ := set $to $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* The pools as JSON: a list of the values of each, with `pool`, its name, and `fullname`, that of its Deployment.
     Without `pools` there is one, "default", which has the name of the release. Of a longer name than 46 characters
     Kubernetes would cut those of its pods, and the autoscaler finds them by it. */}}
{{- define "vecd.pools" -}}
{{- $pools := list }}
{{- range $name, $values := (default (dict "default" dict) .Values.pools) }}
{{- $pool := omit (deepCopy $.Values) "pools" }}
{{- include "vecd.override" (list $pool (default dict $values)) }}
{{- $_ := set $pool "pool" $name }}
{{- $_ := set $pool "fullname" (ternary (printf "%s-%s" (include "vecd.fullname" $ | trunc (int (sub 45 (len $name))) | trimSuffix "-") $name) (include "vecd.fullname" $) (not (empty $.Values.pools))) }}
{{- $_ := set $pool "dtype" (default (ternary "float32" "auto" (gt (len $.Values.pools) 1)) $pool.dtype) }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- toJson (dict "pools" $pools) }}
{{- end }}

{{/* A value as TOML has it. JSON's strings, numbers and booleans are TOML's, too. */}}
{{- define "vecd.toml" -}}
{{- if kindIs "map" . }}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- $pairs = append $pairs (printf "%s = %s" (toJson $key) (include "vecd.toml" $value)) }}
{{- end -}}
{ {{ join ", " $pairs }} }
{{- else if kindIs "slice" . }}
{{- $items := list }}
{{- range . }}
{{- $items = append $items (include "vecd.toml" .) }}
{{- end -}}
[{{ join ", " $items }}]
{{- else -}}
{{ toJson . }}
{{- end }}
{{- end }}

{{/* The file of --config, without the dtype, which is a flag of each pool. */}}
{{- define "vecd.config" -}}
{{- if .Values.model }}
model = {{ toJson .Values.model }}
{{- end }}
host = "0.0.0.0"
port = 8080
# The time after SIGTERM in which vecd still serves, while /health returns 503 and the endpoints are removed.
drain-grace = {{ .Values.drain.graceSeconds }}
drain-timeout = {{ .Values.drain.timeoutSeconds }}
{{- if .Values.existingSecret }}
keys-file = {{ printf "/etc/vecd-keys/%s" .Values.existingSecretKey | toJson }}
{{- end }}
{{- range $key, $value := .Values.config }}
{{ $key }} = {{ include "vecd.toml" $value }}
{{- end }}
{{- range $name, $model := .Values.models }}
[models.{{ toJson $name }}]
{{- range $key, $value := $model }}
{{ $key }} = {{ include "vecd.toml" $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the schema cannot say. Each message begins with the value. */}}
{{- define "vecd.check" -}}
{{- $v := .Values }}
{{- if and $v.model $v.models }}
{{- fail "model: has no effect beside models: name it there, as models.NAME.source" }}
{{- end }}
{{- $sources := 0 }}
{{- range list $v.weights.existingClaim $v.weights.image $v.weights.claim.size }}
{{- if . }}{{ $sources = add $sources 1 }}{{ end }}
{{- end }}
{{- if gt (int $sources) 1 }}
{{- fail "weights: only one of existingClaim, image and claim.size may be set" }}
{{- end }}
{{- $least := add (mul $v.probes.readiness.periodSeconds $v.probes.readiness.failureThreshold) $v.drain.propagationSeconds }}
{{- if lt (int64 $v.drain.graceSeconds) $least }}
{{- fail (printf "drain.graceSeconds: is %d, at least %d are needed: probes.readiness.periodSeconds × failureThreshold + drain.propagationSeconds" (int $v.drain.graceSeconds) $least) }}
{{- end }}
{{- $start := get $v.config "start-timeout" | default 300 }}
{{- if lt (float64 (mul $v.probes.startup.periodSeconds $v.probes.startup.failureThreshold)) (float64 $start) }}
{{- fail (printf "probes.startup: periodSeconds × failureThreshold must be at least the start-timeout of vecd, %v seconds" $start) }}
{{- end }}
{{- $pools := (include "vecd.pools" . | fromJson).pools }}
{{- $dtypes := list }}
{{- range $pools }}
{{- $where := ternary (printf "pools.%s." .pool) "" (not (empty $v.pools)) }}
{{- if gt (len $pools) 1 }}
{{- if eq .dtype "auto" }}
{{- fail (printf "%sdtype: auto is another number format on other hardware, and pools answer behind one name: pin it, such as dtype: float32" $where) }}
{{- end }}
{{- if eq .dtype "int8" }}
{{- fail (printf "%sdtype: int8 is served only where it is faster than float32, and pools answer behind one name: take another" $where) }}
{{- end }}
{{- $dtypes = append $dtypes (printf "%sdtype: %s" $where .dtype) }}
{{- end }}
{{- $pool := . }}
{{- range .extraArgs }}
{{- $flag := regexReplaceAll "=.*" . "" }}
{{- if has $flag (list "--config" "--host" "--port" "--uds" "--admin-host" "--admin-port" "--admin-uds" "--tls-cert" "--tls-key" "--dtype" "--drain-grace" "--drain-timeout" "--keys-file" "--cache-dir") }}
{{- fail (printf "%sextraArgs: %s is not for extraArgs: the chart sets it, or its probes and its Service need it as it is" $where $flag) }}
{{- end }}
{{- end }}
{{- $names := keys .envVars }}
{{- range .env }}{{ $names = append $names .name }}{{ end }}
{{- range $names }}
{{- if has . (list "VECD_CONFIG" "VECD_HOST" "VECD_PORT" "VECD_UDS" "VECD_ADMIN_HOST" "VECD_ADMIN_PORT" "VECD_ADMIN_UDS" "VECD_TLS_CERT" "VECD_TLS_KEY" "VECD_DTYPE" "VECD_DRAIN_GRACE" "VECD_DRAIN_TIMEOUT" "VECD_KEYS_FILE" "VECD_CACHE_DIR") }}
{{- fail (printf "%senv: %s is not for env: the chart sets it, or its probes and its Service need it as it is" $where .) }}
{{- end }}
{{- end }}
{{- if and .autoscaling.enabled (eq .autoscaling.type "keda") (not .autoscaling.keda.serverAddress) }}
{{- fail (printf "%sautoscaling.keda.serverAddress: must be the URL of Prometheus" $where) }}
{{- end }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
{{- fail (printf "%sautoscaling.minReplicas: is more than maxReplicas" $where) }}
{{- end }}
{{- end }}
{{- $distinct := list }}
{{- range $dtypes }}{{ $distinct = append $distinct (regexReplaceAll ".*: " . "") }}{{ end }}
{{- if gt (len (uniq $distinct)) 1 }}
{{- fail (printf "dtype: pools answer behind one name, and their vectors must have one number format: %s" (join ", " $dtypes)) }}
{{- end }}
{{- if gt (len $pools) 1 }}
{{- range $name, $model := $v.models }}
{{- if has (get $model "dtype") (list "auto" "int8") }}
{{- fail (printf "models.%s.dtype: %s is another number format on other hardware, and there are several pools: pin it" $name $model.dtype) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $v.podMonitor.enabled $v.existingSecret (empty $v.podMonitor.authorization) }}
{{- fail "podMonitor.authorization: must name a key with the scope metrics, because existingSecret has keys" }}
{{- end }}
{{- if and $v.httpRoute.enabled (empty $v.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: must name a Gateway" }}
{{- end }}
{{- end }}
