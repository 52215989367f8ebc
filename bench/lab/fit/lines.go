// Package fit learns from what engines and evenkeel itself wrote down: a
// predictor of output lengths (trace or request log), the line of prefill time
// over prompt tokens (request log), and what a decode step costs (step trace).
//
// Every fit says how good it is beside what knowing nothing would give, and
// one that is not good enough says why.
package fit

import (
	"encoding/json"
	"fmt"
	"os"

	"evenkeel/bench/lab/trace"
)

// maxLine bounds a line: a tick of the decision log with 1,024 ranks and a
// pool of thousands is some MB.
const maxLine = 64 << 20

// readLines gives each line of JSON in a file, gzipped or not, to take. A last
// line that its writer has not finished is left out, and cut says so.
func readLines(path string, take func(line []byte) error) (cut bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }() // only read
	lines := trace.Lines{Name: path, Most: maxLine, What: "are these JSON lines?"}
	_, err = lines.Each(f, func(_ int, line []byte, whole bool) (more bool, err error) {
		if cut = !whole && !json.Valid(line); cut {
			return false, nil
		}
		return true, take(line)
	})
	return cut && err == nil, err
}

// decode reads one line into v; what it is meant to be is told on failure.
func decode(line []byte, v any, what string) error {
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("not a line of %s: %w", what, err)
	}
	return nil
}

const cutNote = "the last line is not finished and was left out"
