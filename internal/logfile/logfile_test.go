package logfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOpenAppends(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for _, line := range []string{"a\n", "b\n"} {
		f, err := Open(path)
		require.NoError(t, err)
		_, err = f.WriteString(line)
		require.NoError(t, errors.Join(err, f.Close()))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "a\nb\n", string(text))
}

func TestRestIsThePartOfALineAtTheEnd(t *testing.T) {
	dir, long := t.TempDir(), strings.Repeat("x", 200<<10)
	for name, row := range map[string]struct {
		text  string
		begin int64
		rest  string
	}{
		"empty":            {},
		"whole":            {text: "a\nb\n"},
		"torn":             {text: "a\nbc", begin: 2, rest: "bc"},
		"only a part":      {text: "bc", rest: "bc"},
		"a long whole":     {text: long + "\n"},
		"behind a long":    {text: long + "\nbc", begin: 200<<10 + 1, rest: "bc"},
		"a long part":      {text: "a\n" + long, begin: 2, rest: long[:64<<10]},
		"only a long part": {text: long, rest: long[:64<<10]},
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(row.text), 0o600))
		begin, rest := Rest(path)
		require.Equal(t, row.rest, string(rest), name)
		if len(rest) > 0 {
			require.Equal(t, row.begin, begin, name)
		}
	}
	_, rest := Rest(filepath.Join(dir, "none"))
	require.Empty(t, rest)
	_, rest = Rest(dir)
	require.Empty(t, rest)
}

// disk takes a part of each write, and fails.
type disk struct {
	text  []byte
	takes int
}

func (d *disk) Write(p []byte) (int, error) {
	if d.takes < len(p) {
		d.text = append(d.text, p[:d.takes]...)
		return d.takes, errors.New("full")
	}
	d.text = append(d.text, p...)
	return len(p), nil
}

func TestALineBehindAPartOfOneBeginsAnew(t *testing.T) {
	for takes, want := range map[int]string{0: "a\nc\n", 1: "a\nb\nc\n", 2: "a\nbb\nc\n", 9: "a\nbb\nc\n"} {
		d := &disk{takes: 9}
		w := Writer{Log: d}
		_, err := w.WriteLine([]byte("a\n"))
		require.NoError(t, err)
		d.takes = takes
		_, _ = w.WriteLine([]byte("bb\n"))
		d.takes = 9
		_, err = w.WriteLine([]byte("c\n"))
		require.NoError(t, err)
		require.Equal(t, want, string(d.text), takes)
	}
}

// Nobody reads the pipe, and none of these calls waits for a reader.
func TestAPipeIsNotWaitedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	done := make(chan error, 1)
	go func() {
		f, err := Open(path)
		if err == nil {
			_, err = f.WriteString("a\n")
			err = errors.Join(err, f.Close())
		}
		done <- err
	}()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		t.Fatal("it waits for a reader")
	}
}
