package policytables

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/trace"
)

func TestTracesOfOneNameAreToldApart(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for _, sub := range []string{"a", "b"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
		path := filepath.Join(dir, sub, "t.csv")
		require.NoError(t, os.WriteFile(path, []byte("0.0,5,5\n1.0,5,5\n"), 0o644))
		files = append(files, path)
	}
	s, err := ReadTraces(files)
	require.NoError(t, err)
	require.Equal(t, "t.csv", s.Real[0].Name)
	require.Equal(t, "t.csv (2)", s.Real[1].Name)
}

func TestATraceThatIsNotThereIsAnError(t *testing.T) {
	_, err := ReadTraces([]string{filepath.Join(t.TempDir(), "none.csv")})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestCommandsNameTheSameTrace(t *testing.T) {
	s, err := ReadTraces(nil)
	require.NoError(t, err)
	for _, on := range s.Real {
		read, err := trace.Read(filepath.Join("..", "..", "..", on.Flag), trace.Options{})
		require.NoError(t, err)
		require.Equal(t, on.From.Trace, read, on.Flag)
	}
}
