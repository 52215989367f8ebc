package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSystemdIsTold plays the service manager: it hears of start, reload and end.
func TestSystemdIsTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	hears, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	defer hears.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	next := func() string {
		require.NoError(t, hears.SetReadDeadline(time.Now().Add(patience)))
		b := make([]byte, 256)
		n, err := hears.Read(b)
		require.NoError(t, err)
		return string(b[:n])
	}

	flags, _, _ := cluster(t, time.Millisecond)
	proxy := serve(t, flags...)
	require.Equal(t, "READY=1", next())
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGHUP))
	require.Equal(t, "RELOADING=1", next())
	require.Equal(t, "READY=1", next())
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGINT))
	require.Equal(t, "STOPPING=1", next())
	require.Zero(t, proxy.wait(t))
}

// TestTheUnitIsOne asks systemd about the unit file, where systemd is.
func TestTheUnitIsOne(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze here")
	}
	unit, err := os.ReadFile("../../configs/systemd/evenkeel.service")
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "evenkeel.service")
	here := strings.ReplaceAll(string(unit), "/usr/local/bin/evenkeel", os.Args[0]) // it looks for the program
	require.NoError(t, os.WriteFile(file, []byte(here), 0o644))
	out, err := exec.Command(analyze, "verify", "--man=no", file).CombinedOutput()
	require.NoError(t, err, string(out))
	require.NotContains(t, string(out), filepath.Base(file), "it says nothing of ours")
}
