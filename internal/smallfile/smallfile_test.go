package smallfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	_, err := Read(path, 3)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte("abc"), 0o600))
	text, err := Read(path, 3)
	require.NoError(t, err)
	require.Equal(t, "abc", string(text))
	_, err = Read(path, 2)
	require.EqualError(t, err, path+": larger than 2 bytes; is it the right file?")
	_, err = Read("/dev/zero", 1<<10)
	require.ErrorContains(t, err, "larger than 1024 bytes")
}
