#!/usr/bin/env bash
# The whole guard on generated trajectories, into the folder named by the first argument:
# generate, embed, train both stages, calibrate, evaluate on held-out templates, score an archive.
set -euo pipefail
out=${1:-demo}
config="$(dirname "$0")/demo.yaml"

run() {
  echo
  echo "\$ jaxguard $*"
  jaxguard "$@"
}

rm -rf "$out"
run generate --config "$config" --out "$out/data"
run embed --trajectories "$out/data" --store "$out/features"
run train --config "$config" --out "$out/run" "data.trajectories=[$out/data]" "data.store=$out/features"
run calibrate "$out/run"
run evaluate "$out/run"
run generate --config "$config" --out "$out/archive" data.drift.trajectories=200 data.drift.seed=7
run score "$out/archive" --guard "$out/run/guard" --out "$out/scores" --store "$out/features"
run report "$out/scores"
echo
echo "Open $out/run/report/report.html and $out/scores/report/report.html."
