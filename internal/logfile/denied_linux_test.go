package logfile

import (
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A pipe may be written to, and not read, by the user that the proxy runs as. Root may read
// everything, so it opens the pipe as nobody.
func TestAPipeThatMayNotBeRead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o222))
	require.NoError(t, os.Chmod(path, 0o222)) // whatever the umask is
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	opened := make(chan error)
	open := func() {
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine, so that nobody else runs on it
			if os.Getuid() == 0 {
				if err := syscall.Setfsuid(65534); err != nil {
					opened <- err
					return
				}
			}
			f, err := Open(path)
			if err == nil {
				err = f.Close()
			}
			opened <- err
		}()
	}
	open()
	require.ErrorIs(t, <-opened, syscall.ENXIO, "there is no reader")
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if os.Getuid() != 0 {
		require.Error(t, err, "it may not be read")
		return
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, reader.Close()) }()
	open()
	require.NoError(t, <-opened, "its reader is there")
}
