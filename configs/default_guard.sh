#!/usr/bin/env bash
# Makes the guard in the package anew: the same data, settings and versions give the same bytes.
# Usage: bash configs/default_guard.sh DATA [OUT]; DATA holds the folders stepshield, asb and agentdyn.
set -euo pipefail
DATA=${1:?usage: default_guard.sh DATA [OUT]}
OUT=${2:-jaxguard/default_guard}
CONFIG=configs/default_guard.yaml
for name in stepshield asb agentdyn; do jaxguard convert "$DATA/$name" --out "data/$name"; done
jaxguard generate --config $CONFIG --out data/drift
for name in stepshield asb agentdyn drift; do jaxguard embed --trajectories "data/$name" --store data/features; done
jaxguard train --config $CONFIG --out runs/default_guard
jaxguard calibrate runs/default_guard
jaxguard evaluate runs/default_guard
jaxguard ship runs/default_guard --about configs/default_guard.md --out "$OUT"
