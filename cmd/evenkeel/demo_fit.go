package main

import (
	"fmt"
	"os"
	"time"

	"evenkeel/bench/fit"
	"evenkeel/bench/trace"
	"evenkeel/predictor"
)

// demoHistory is how many requests before the replayed ones a predictor learns
// from: what a proxy has seen after a few minutes.
const demoHistory = 2000

// writeDemoFit writes what `evenkeel fit` would and returns its path, or "" where
// there are too few requests to learn from: the proxy then learns as it goes.
func writeDemoFit(history []trace.Request, path, source string) (string, error) {
	const enough = 100
	if len(history) < enough {
		return "", nil
	}
	learned, err := predictor.Train(string(predictor.KindSurvival), fit.Samples(history),
		predictor.Options{Created: time.Now(), Source: predictor.Source{File: source, Rows: len(history)}})
	if err != nil {
		return "", fmt.Errorf("fitting the requests before those that are sent: %w", err)
	}
	text, err := learned.Encode()
	if err != nil {
		return "", err
	}
	return path, os.WriteFile(path, text, 0o644)
}
