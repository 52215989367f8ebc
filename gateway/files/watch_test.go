package files

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func write(t *testing.T, file, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}

// However a file is replaced, whoever looks after the call finds the new one.
func TestWatch(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		make func(t *testing.T, dir string) // leaves dir/etc/f
		swap func(t *testing.T, dir string)
	}{
		{"written in place", func(t *testing.T, dir string) { write(t, dir+"/etc/f", "old") }, func(t *testing.T, dir string) { write(t, dir+"/etc/f", "new") }},
		{"renamed over, as editors do", func(t *testing.T, dir string) { write(t, dir+"/etc/f", "old") }, func(t *testing.T, dir string) {
			write(t, dir+"/etc/.f.swp", "new")
			require.NoError(t, os.Rename(dir+"/etc/.f.swp", dir+"/etc/f"))
		}},
		{"removed and made again", func(t *testing.T, dir string) { write(t, dir+"/etc/f", "old") }, func(t *testing.T, dir string) {
			require.NoError(t, os.Remove(dir+"/etc/f"))
			write(t, dir+"/etc/f", "new")
		}},
		{"a ConfigMap's symlink swapped", func(t *testing.T, dir string) {
			write(t, dir+"/etc/..1/f", "old")
			require.NoError(t, os.Symlink("..1", dir+"/etc/..data"))
			require.NoError(t, os.Symlink("..data/f", dir+"/etc/f"))
		}, func(t *testing.T, dir string) {
			write(t, dir+"/etc/..2/f", "new")
			require.NoError(t, os.Symlink("..2", dir+"/etc/..data_tmp"))
			require.NoError(t, os.Rename(dir+"/etc/..data_tmp", dir+"/etc/..data"))
			require.NoError(t, os.RemoveAll(dir+"/etc/..1"))
		}},
		{"behind a symlink to elsewhere", func(t *testing.T, dir string) {
			write(t, dir+"/elsewhere/f", "old")
			require.NoError(t, os.MkdirAll(dir+"/etc", 0o755))
			require.NoError(t, os.Symlink(dir+"/elsewhere/f", dir+"/etc/f"))
		}, func(t *testing.T, dir string) { write(t, dir+"/elsewhere/f", "new") }},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			row.make(t, dir)
			ctx, cancel := context.WithCancel(t.Context())
			looks, seen := 0, make(chan string, 100)
			done := make(chan struct{})
			go func() {
				defer close(done)
				Watch(ctx, func() []string { return []string{dir + "/etc/f"} }, func() {
					looks++
					text, _ := os.ReadFile(dir + "/etc/f")
					seen <- string(text)
				}, zap.NewNop())
			}()
			require.Equal(t, "old", <-seen, "at the start")
			write(t, dir+"/etc/other", "noise")
			row.swap(t, dir)
			for text := ""; text != "new"; {
				select {
				case text = <-seen:
				case <-time.After(poll / 2):
					t.Fatal("nobody told")
				}
			}
			cancel()
			<-done
			require.LessOrEqual(t, looks, 4, "a burst of events is one look")
		})
	}
}

func TestResolutionPathsEndOnALoop(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.Symlink("b", dir+"/a"))
	require.NoError(t, os.Symlink("a", dir+"/b"))
	require.LessOrEqual(t, len(resolutionPaths(dir+"/a")), maxLinks+2)
}
