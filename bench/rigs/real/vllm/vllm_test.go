package vllm

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/rigs/pyenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMetadataIsWhatPythonReads(t *testing.T) {
	site := t.TempDir()
	require.NoError(t, Metadata(site, "a", "1.0", "[x]\ny = z\n"))
	said, err := os.ReadFile(filepath.Join(site, "a-1.0.dist-info", "METADATA"))
	require.NoError(t, err)
	require.Equal(t, "Metadata-Version: 2.1\nName: a\nVersion: 1.0\n", string(said))
	said, err = os.ReadFile(filepath.Join(site, "a-1.0.dist-info", "entry_points.txt"))
	require.NoError(t, err)
	require.Equal(t, "[x]\ny = z\n", string(said))
}

// fake is an installation whose engine is a shell script that starts another
// process and waits for it.
func fake(t *testing.T) *Installation {
	i := &Installation{pyenv.Env{Dir: t.TempDir()}}
	require.NoError(t, os.MkdirAll(filepath.Dir(i.Python()), 0o755))
	script := "#!/bin/sh\necho $@\nsleep 60 &\necho $! > " + filepath.Join(i.Dir, "child") + "\nwait\n"
	require.NoError(t, os.WriteFile(i.Bin("vllm"), []byte(script), 0o700)) //nolint:gosec // it must be executable
	return i
}

func TestAnEngineEndsWithAllItStarted(t *testing.T) {
	i := fake(t)
	log := filepath.Join(i.Dir, "log")
	e, err := i.Serve("model", 1, log, nil, "--flag")
	require.NoError(t, err)
	require.ErrorContains(t, e.Ready(t.Context(), 0), "its log is "+log)
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(i.Dir, "child")); return err == nil }, time.Minute,
		5*time.Millisecond)
	e.Stop()
	<-e.Gone()
	require.Error(t, syscall.Kill(-e.Pid, 0), "nobody of its group is left")
	e.Stop() // once more
	(*Engine)(nil).Stop()
	said, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Contains(t, string(said), "serve model --served-model-name tiny --host 127.0.0.1 --port 1 ")
	require.Contains(t, string(said), " --flag\n")
}
