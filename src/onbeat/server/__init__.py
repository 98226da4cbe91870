"""The OpenAI-compatible HTTP server; it knows the engine only as `core.EngineClient`.

The way of a request, and what holds for all of them:

=================================  ====================================================================
`connection`, `middleware`         bounds of a connection; id, log, key and size of a request
`rate_limits`                      what an API key may take
`chat`, `completions`              a route each, with its body and its answers
`tokenization`, `status`           the tokenizer; health, version, models, the fleet
`body`, `fields`                   bytes to a checked body; which fields are honoured, refused, ignored
`generation_request`               fields of both completion endpoints
`engine_requests`                  the engine's requests, one for each choice
`objectives`, `slo_defaults`       what a request is held to: as it states, as the server is configured
`chat_prompt`, `prompts`           messages to text; text to tokens, off the event loop
`generation`                       the engine's deliveries to pieces of text; which requests are open
`answer`                           sends the pieces, streamed or whole
`pen`, `logprobs`, `pieces`        what all APIs' answers share; log-probabilities; JSON that may be long
`answer_report`                    usage, and how objectives were kept
`errors`, `openapi`, `telemetry`   statuses and bodies of errors; the description; the metrics
`app`, `services`, `server_config` put together: what routes share and watch, what can be configured
`listening`, `run`                 the socket; drain, stop
=================================  ====================================================================
"""
