// Package recording writes the events and effects of gateway/lifecycle and gateway/fleet/roster to
// a file, so that a test can replay the requests and rosters of a real run. It does so only in a
// program that was linked with the name of a file, as `go run ./bench/rigs/chaos
// -record FILE` does. In every other program it costs one comparison per step.
package recording

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"evenkeel/gateway/lifecycle"
)

// file is the name of the recording, set by the linker; empty: nothing is recorded. The file must
// not exist yet.
var file string

const maxFileBytes = 256 << 20 // most bytes of a recording; further lines are dropped

var requestsFile = open(file)

var (
	lastID  atomic.Int64 // the last ID that a Recorder or a Roster got
	written atomic.Int64 // bytes written so far, and those of lines that were dropped
)

// open creates the file of a recording; nil: name is empty, so nothing is recorded.
func open(name string) *os.File {
	if name == "" {
		return nil
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err) // the program was built only to record, so it must not run without a recording
	}
	return f
}

// A Recorder records one request's Lifecycle. Only the goroutine that owns the Lifecycle may use
// it.
type Recorder struct{ id int64 }

// A line is one step of a Lifecycle. The lines of one Recorder have its ID, and are in the order of
// the steps.
type line struct {
	ID    int64
	Value string             `json:",omitempty"` // the whole Lifecycle, before the event that begins the request or continues its lost answer
	Event *lifecycle.Event   `json:",omitempty"`
	Do    []lifecycle.Effect `json:",omitempty"`
}

// recordsRequests says whether this program was linked to record requests.
func recordsRequests() bool { return requestsFile != nil }

// Begin records the state of a Lifecycle, before the event that begins the request or continues its
// lost answer.
func (r *Recorder) Begin(l *lifecycle.Lifecycle) {
	if recordsRequests() {
		r.write(line{Value: fmt.Sprint(*l)})
	}
}

// Step records an event of a Lifecycle, and the effects that it returned.
func (r *Recorder) Step(e lifecycle.Event, todo []lifecycle.Effect) {
	if recordsRequests() {
		r.write(line{Event: new(e), Do: slices.Clone(todo)})
	}
}

// write appends a line. It drops lines once the file is full: the file then has the first steps of
// some requests, which can also be replayed. If the file cannot be written the program ends,
// because otherwise lines in the middle would be missing.
func (r *Recorder) write(l line) {
	if r.id == 0 {
		r.id = lastID.Add(1)
	}
	l.ID = r.id
	appendLine(requestsFile, l)
}

// appendLine appends a line to a file. It drops the line if the recording would get larger than
// maxFileBytes, and panics if the line cannot be written.
func appendLine(to *os.File, line any) {
	text, err := json.Marshal(line)
	if err == nil && written.Add(int64(len(text)+1)) <= maxFileBytes {
		_, err = to.Write(append(text, '\n'))
	}
	if err != nil {
		panic(err)
	}
}
