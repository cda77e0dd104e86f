"""The suite's core, run with the oldest and the newest versions that the README promises."""
