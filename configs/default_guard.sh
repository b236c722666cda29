#!/usr/bin/env bash
# Makes the guard in the package anew: the same data, settings and versions give the same bytes.
# Usage: bash configs/default_guard.sh DATA [OUT]; DATA holds the folders stepshield and agentdyn. Works in the current folder.
set -euo pipefail
DATA=${1:?usage: default_guard.sh DATA [OUT]}
CONFIGS=$(dirname "$0")
OUT=${2:-$CONFIGS/../jaxguard/default_guard}
jaxguard convert "$DATA/stepshield/train.jsonl.gz" --out data/stepshield
jaxguard convert "$DATA/agentdyn" --out data/agentdyn
jaxguard generate --config "$CONFIGS/default_guard.yaml" --out data/drift
for name in stepshield agentdyn drift; do
  jaxguard embed --config "$CONFIGS/default_guard.yaml" --trajectories "data/$name" --store data/features
done
jaxguard train --config "$CONFIGS/default_guard.yaml" --out runs/default_guard
jaxguard calibrate runs/default_guard
jaxguard evaluate runs/default_guard
jaxguard ship runs/default_guard --about "$CONFIGS/default_guard.md" --out "$OUT"
