{{- define "onbeat.labels" -}}
app.kubernetes.io/name: onbeat
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "onbeat.selector" -}}
app.kubernetes.io/name: onbeat
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "onbeat.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What pods of both kinds share: one container that serves. */ -}}
{{- define "onbeat.server" -}}
image: {{ include "onbeat.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
ports: [{name: http, containerPort: 8000}]
env:
  - {name: HOME, value: /data}
  - {name: XDG_CACHE_HOME, value: /data/cache}
  {{- with .Values.apiKeySecret }}
  - name: ONBEAT_API_KEY
    valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: api-key}}
  {{- end }}
  {{- include "onbeat.env" . | nindent 2 }}
startupProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 5, failureThreshold: 120}
livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 5, timeoutSeconds: 5}
lifecycle: {preStop: {exec: {command: ["sleep", {{ .Values.preStopSeconds | quote }}]}}}
resources: {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts: {{- include "onbeat.mounts" . | nindent 2 }}
{{- end }}

{{- /* What all containers have, those of Ray too. */ -}}
{{- define "onbeat.env" -}}
{{- with .Values.hfTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "onbeat.mounts" -}}
- {name: cache, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "onbeat.pod" -}}
terminationGracePeriodSeconds: {{ add .Values.shutdownTimeout .Values.preStopSeconds 10 }}
automountServiceAccountToken: false
securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  - name: cache
    {{- if .Values.cache.size }}
    persistentVolumeClaim: {claimName: {{ .Release.Name }}-cache}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- with .Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "onbeat.args" -}}
- serve
{{- with .Values.model }}
- {{ . | quote }}
{{- end }}
- --host
- 0.0.0.0
- --port
- "8000"
- --shutdown-timeout
- {{ .Values.shutdownTimeout | quote }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}
