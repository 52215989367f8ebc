package recording

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/gateway/lifecycle"
)

// records has the package record into a file until the test ends. It returns what was written so
// far.
func records(t *testing.T) (lines func() []line) {
	name := filepath.Join(t.TempDir(), "recording")
	requestsFile = open(name)
	t.Cleanup(func() {
		require.NoError(t, requestsFile.Close())
		requestsFile = nil
		written.Store(0)
	})
	return func() (all []line) {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for one := range strings.Lines(string(text)) {
			var l line
			require.NoError(t, json.Unmarshal([]byte(one), &l))
			all = append(all, l)
		}
		return all
	}
}

func TestALineForEachStepInTheOrderOfEachLife(t *testing.T) {
	lines := records(t)
	var l lifecycle.Lifecycle
	var one, other Recorder
	l.MustServeHere = true
	value := fmt.Sprint(l)
	one.Begin(&l)
	begun := lifecycle.Event{Kind: lifecycle.Begun}
	todo := l.Step(begun, nil)
	one.Step(begun, todo)
	var second lifecycle.Lifecycle
	other.Begin(&second)
	none := lifecycle.Event{Kind: lifecycle.NoLocal}
	one.Step(none, nil)
	id := one.id
	require.Equal(t, []line{
		{ID: id, Value: value},
		{ID: id, Event: &begun, Do: todo},
		{ID: id + 1, Value: fmt.Sprint(second)},
		{ID: id, Event: &none},
	}, lines())
}

func TestAFileIsBounded(t *testing.T) {
	lines := records(t)
	var recorder Recorder
	recorder.Begin(new(lifecycle.Lifecycle))
	written.Store(maxFileBytes - 10)
	recorder.Begin(new(lifecycle.Lifecycle))
	require.Len(t, lines(), 1)
}

func TestAFileThatIsThereIsNotMixedWithAnother(t *testing.T) {
	name := filepath.Join(t.TempDir(), "recording")
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	require.Panics(t, func() { open(name) })
	require.Nil(t, open(""), "and without a name there is none")
}

// A program that does not record pays a comparison for each step. What an event refers to stays on
// its stack.
func TestWhatIsNotRecordedAllocatesNothing(t *testing.T) {
	var l lifecycle.Lifecycle
	var recorder Recorder
	require.Zero(t, testing.AllocsPerRun(100, func() {
		var room [8]lifecycle.Effect
		recorder.Begin(&l)
		recorder.Step(lifecycle.Event{}, l.Step(lifecycle.Event{Kind: lifecycle.Begun}, room[:0]))
	}))
}
