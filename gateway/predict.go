package gateway

import (
	"bytes"
	"fmt"
	"os"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/predictor"
)

// fitFile is the file predictions start from. It is read again whenever it
// changes; one that cannot be used leaves what was read before in force.
type fitFile struct {
	path string
	seen fileState
}

// fileState tells versions of a file apart.
type fileState struct {
	modified time.Time
	size     int64
}

// maxFit bounds what is read: 200 trees of depth 4 and 4096 keys are some MB.
const maxFit = 256 << 20

// read parses the file if it is not the one read last; nil when it is, or when
// there is none to read.
func (f *fitFile) read() (*predictor.Fit, error) {
	if f.path == "" {
		return nil, nil
	}
	info, err := os.Stat(f.path)
	if err != nil {
		return nil, err
	}
	state := fileState{info.ModTime(), info.Size()}
	if state == f.seen {
		return nil, nil
	}
	f.seen = state // also of a bad one: it is told once
	if state.size > maxFit {
		return nil, fmt.Errorf("%s has %d bytes, more than %d: it is no fit file", f.path, state.size, maxFit)
	}
	text, err := os.ReadFile(f.path)
	if err != nil {
		return nil, err
	}
	fit, err := predictor.ParseFit(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.path, err)
	}
	return fit, nil
}

// readPromptKey reads what keys the hashes that tell prompts apart; nil: nobody does.
func readPromptKey(p board.PredictorConfig) (*[]byte, error) {
	if p.Kind != predictor.KindExact {
		return nil, nil
	}
	text, err := os.ReadFile(p.SecretFile)
	if err != nil {
		return nil, fmt.Errorf("predictor.secret_file: %w", err)
	}
	if text = bytes.TrimSpace(text); len(text) < leastSecret {
		return nil, fmt.Errorf("predictor.secret_file: %s has %d bytes, at least %d are needed that nobody guesses: head -c 32 /dev/urandom | base64 > %[1]s", p.SecretFile, len(text), leastSecret)
	}
	return &text, nil
}

// leastSecret is 128 bits.
const leastSecret = 16
