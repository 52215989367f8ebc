package logfile

import (
	"errors"
	"os"
	"path/filepath"
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
