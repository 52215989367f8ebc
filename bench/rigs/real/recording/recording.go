// Package recording holds what real vLLM engines answered, one file for each situation. Tests give
// the answers to evenkeel's parsers, and hold the reference engines to the same shapes. Package
// bench/rigs/real/recorder makes the files.
package recording

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Recording is one request to a real engine and its answer.
type Recording struct {
	Name   string  `json:"-"`                // of the file, without its ending
	About  string  `json:"about"`            // the situation, in words
	Engine string  `json:"engine"`           // plain, prefill or decode
	Client string  `json:"client,omitempty"` // the body of the client whose leg this is
	Ask    Request `json:"request"`

	Status int      `json:"status"`
	Head   []string `json:"head"`   // lines as they came, without the status line
	End    string   `json:"end"`    // how the answer ended: whole, left (by the client) or cut (by the engine)
	Pieces []string `json:"pieces"` // of the body, as they arrived; chunked framing is taken off
}

// Request is what the engine was asked.
type Request struct {
	Method string `json:"method"`
	Path   string `json:"path"`
	ID     string `json:"id,omitempty"`   // X-Request-Id
	Body   string `json:"body,omitempty"` // as sent, so that it can also be no JSON
}

// How an answer ended.
const (
	Whole = "whole"
	Left  = "left"
	Cut   = "cut"
)

// Body is the whole body.
func (r *Recording) Body() []byte { return []byte(strings.Join(r.Pieces, "")) }

// Header is the first value of a header, empty if there is none.
func (r *Recording) Header(name string) string {
	for _, line := range r.Head {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.EqualFold(key, name) {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Streams tells whether the answer is a stream of events.
func (r *Recording) Streams() bool {
	return strings.HasPrefix(r.Header("Content-Type"), "text/event-stream")
}

// Events are KV events as the prefill engine published them, each message with all its frames.
type Events struct {
	About    string     `json:"about"`
	Requests []string   `json:"requests"` // names of the recordings whose prompts caused them, in order
	Live     [][][]byte `json:"live"`
	Replay   [][][]byte `json:"replay"` // the answer to a request for all batches from 0 on
}

// Dir is where the recordings of this version stand, from any folder of the repository.
func Dir() string {
	root := "."
	for range 8 {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		root = filepath.Join(root, "..")
	}
	return filepath.Join(root, "bench", "rigs", "real", "recording", "testdata", "vllm-0.32.0")
}

// KVEventsFile is the one file that is no Recording.
const KVEventsFile = "kv-events.json"

// All reads every recording, sorted by name.
func All() ([]*Recording, error) {
	files, err := filepath.Glob(filepath.Join(Dir(), "*.json"))
	if err != nil {
		return nil, err
	}
	var all []*Recording
	for _, file := range files {
		if filepath.Base(file) == KVEventsFile {
			continue
		}
		r := &Recording{Name: strings.TrimSuffix(filepath.Base(file), ".json")}
		if err := load(file, r); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("recording: no files in %s", Dir())
	}
	return all, nil
}

// KVEvents reads the KV events.
func KVEvents() (e Events, err error) {
	err = load(filepath.Join(Dir(), KVEventsFile), &e)
	return e, err
}

func load(file string, v any) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("recording %s: %w", filepath.Base(file), err)
	}
	return nil
}
