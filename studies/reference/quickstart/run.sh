#!/bin/sh
# Starts the server as it was measured. Written by `tuner export`; change the study, not this file.
#
#   study        quickstart, launch 13, of 2026-11-29T21:25:42+00:00
#   candidate    0d3edbd0b949: {"speculation": "none"}
#   decision     no winner: keep the baseline, because not separated: the interval of the best finalist over 4 pairs reaches below +1 %; at the noise seen, they would show a gain of +46.0 % four times in five
#   engine       bundled 0.1.0+53c96572
#   machine      {"cores": 2, "cpu": "Intel(R) Xeon(R) Processor", "gpus": [], "memory_gib": 24}
#   record       2df75ab26e1f
#   at 1         44.2 tok/s, baseline 44.2 (4 blocks, confirm)
#   at 8         180.9 tok/s, baseline 180.9 (4 blocks, confirm)
#
# HOST and PORT in the environment move the server; nothing else changes.
set -eu
spec_tuner_host=${HOST:-127.0.0.1}
spec_tuner_port=${PORT:-22793}
exec /home/user/spec-tuner/.venv/bin/python \
    -m engine \
    serve \
    --model smollm2-135m \
    --served-model-name smollm2-135m \
    --host "$spec_tuner_host" \
    --port "$spec_tuner_port" \
    --speculation none
