// Package recording writes down what happens to each request, as gateway/lifecycle is told of it, and what gateway/lifecycle says to
// that. It also writes down what gateway/fleet/roster is told, and what is published for that. So a test can drive the lives and the
// rosters of a real run again. A program does so only if it was linked with the name of a file, as
// `go run ./bench/rigs/chaos -record FILE` does it. In every other program a recording is one comparison.
package recording

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"evenkeel/gateway/lifecycle"
)

// file is set by the linker. No file of that name may be there yet.
var file string

const limit = 256 << 20 // bytes

var out = open(file)

var lives, written atomic.Int64

func open(name string) *os.File {
	if name == "" {
		return nil
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err) // whoever built this program wants nothing else of it
	}
	return f
}

// A Tape is the recording of one life. Whoever has the value has the tape.
type Tape struct{ id int64 }

// A line is one step. The lines of a tape have its ID, and stand in their order.
type line struct {
	ID    int64
	Value string             `json:",omitempty"` // of a life that is about to be told that it begins, or goes on: all of it
	Event *lifecycle.Event   `json:",omitempty"`
	Do    []lifecycle.Effect `json:",omitempty"`
}

// Begin records how a life stands before it is told that the request begins, or that its answer is to go on.
func (t *Tape) Begin(l *lifecycle.Lifecycle) {
	if out != nil {
		t.write(line{Value: fmt.Sprint(*l)})
	}
}

// Step records an event of a life, and what is to be done.
func (t *Tape) Step(e lifecycle.Event, todo []lifecycle.Effect) {
	if out != nil {
		t.write(line{Event: new(e), Do: slices.Clone(todo)})
	}
}

// write appends a line. A full file takes no more of them: what it has then are beginnings of lives, which can be driven, too. A file
// that cannot be written ends the program, because lines would be missing in the middle.
func (t *Tape) write(l line) {
	if t.id == 0 {
		t.id = lives.Add(1)
	}
	l.ID = t.id
	put(out, l)
}

// put appends a line to a file.
func put(to *os.File, line any) {
	text, err := json.Marshal(line)
	if err == nil && written.Add(int64(len(text)+1)) <= limit {
		_, err = to.Write(append(text, '\n'))
	}
	if err != nil {
		panic(err)
	}
}
