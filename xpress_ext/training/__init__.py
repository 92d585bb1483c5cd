"""Training of a drafter and its XPress refiner on a target's own answers (docs/method.md)."""
