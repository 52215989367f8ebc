// Package fit learns from what engines and evenkeel itself wrote down: a
// predictor of output lengths (trace or request log), the line of prefill time
// over prompt tokens (request log), and what a decode step costs (step trace).
//
// Every fit says how good it is beside what knowing nothing would give, and
// one that is not good enough says why.
package fit

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
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
	br := bufio.NewReaderSize(f, 64<<10)
	if magic, err := br.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(br)
		if err != nil {
			return false, fmt.Errorf("%s: %w; the file is damaged, or not gzip", path, err)
		}
		br = bufio.NewReaderSize(z, 64<<10)
	}
	return scanLines(br, path, take)
}

func scanLines(r io.Reader, name string, take func(line []byte) error) (cut bool, err error) {
	ended := false // the last line read ended with a newline
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 64<<10), maxLine)
	sc.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		advance, token, err := bufio.ScanLines(data, atEOF)
		ended = advance > 0 && data[advance-1] == '\n'
		return advance, token, err
	})
	n := 0
	for sc.Scan() {
		n++
		line := bytes.TrimSpace(sc.Bytes())
		if len(line) == 0 {
			continue
		}
		if !ended && !json.Valid(line) {
			return true, nil
		}
		if err := take(line); err != nil {
			return false, fmt.Errorf("%s:%d: %w", name, n, err)
		}
	}
	switch err := sc.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return false, fmt.Errorf("%s:%d: line longer than %d bytes; are these JSON lines?", name, n+1, maxLine)
	case err != nil:
		return false, fmt.Errorf("%s:%d: %w", name, n+1, err)
	}
	return false, nil
}

// decode reads one line into v; what it is meant to be is told on failure.
func decode(line []byte, v any, what string) error {
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("not a line of %s: %w", what, err)
	}
	return nil
}

const cutNote = "the last line is not finished and was left out"
