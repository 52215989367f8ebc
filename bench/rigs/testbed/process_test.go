package testbed

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAProcessIsLoggedAndItsEndKnown(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	for range 2 { // a restart goes on where the first left off
		p, err := Start(exec.Command("sh", "-c", "echo said; exit 3"), log)
		require.NoError(t, err)
		<-p.Gone()
		require.EqualError(t, p.Err(), "exit status 3")
		p.Kill() // it has ended
	}
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Equal(t, "said\nsaid\n", string(text))

	p, err := Start(exec.Command("sleep", "60"), log)
	require.NoError(t, err)
	p.Kill()
	require.EqualError(t, p.Err(), "signal: killed")
	(*Process)(nil).Kill()
	_, err = Start(exec.Command("no-such-program"), log)
	require.Error(t, err)
}

func TestAFreeAddressStaysFree(t *testing.T) {
	at := FreeAddresses(1)[0]
	require.NotContains(t, at, ":0")
	for range 2 { // a program that listens there can be started again
		ln, err := net.Listen("tcp", at)
		require.NoError(t, err)
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		require.NoError(t, errors.Join(c.Close(), ln.Close()))
	}
	if runtime.GOOS != "linux" {
		t.Skip("only Linux can hold a port at which nobody listens")
	}
	runtime.GC()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, syscall.Close(fd)) }()
	to := &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(netip.MustParseAddrPort(at).Port())}
	require.ErrorIs(t, syscall.Bind(fd, to), syscall.EADDRINUSE, "another may have it")
}

func TestWhetherAProcessAnswers(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	log := filepath.Join(t.TempDir(), "log")
	p, err := Start(exec.Command("sleep", "60"), log)
	require.NoError(t, err)
	require.NoError(t, p.Answers(t.Context(), time.Minute, srv.URL))
	require.Equal(t, 2, asked)
	p.Kill()
	require.ErrorContains(t, p.Answers(t.Context(), time.Minute, "http://127.0.0.1:1"), "signal: killed")
}

func TestUsageIsOfTheProcessesNamed(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("no /proc here, so nothing tells what a process uses")
	}
	most := PeakRSS(func() []int { return []int{os.Getpid()} })
	require.Greater(t, RSS(os.Getpid()), int64(1<<20))
	require.Zero(t, RSS(1<<30), "there is no such process")
	require.GreaterOrEqual(t, most(), int64(0))
}

func TestSeriesOfAPage(t *testing.T) {
	page := []byte("# HELP a_total All.\na_total{x=\"1 2\"} 3\na_total{x=\"b\"} 4.5\nab 1\nbroken\nnot a number\n")
	require.Equal(t, map[string]float64{`a_total{x="1 2"}`: 3, `a_total{x="b"}`: 4.5, "ab": 1}, Series(page))
	require.Equal(t, 7.5, Sum(page, "a_total{"))
	require.Zero(t, Sum(page, "none"))
}

func TestAwait(t *testing.T) {
	times := 0
	require.NoError(t, Await(t.Context(), time.Minute, "it is the third time", func() bool { times++; return times == 3 }))
	require.ErrorContains(t, Await(t.Context(), 0, "day is night", func() bool { return false }), "it is not so that day is night")
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, Await(over, time.Minute, "", func() bool { return false }), context.Canceled)
}
