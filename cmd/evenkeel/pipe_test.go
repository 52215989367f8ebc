package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// whole asks for a short answer and requires that it comes.
func (p *process) whole(t *testing.T) {
	t.Helper()
	resp, err := p.client.Post(p.public+"/v1/completions", "application/json", strings.NewReader(`{"model":"ref","prompt":"some words","max_tokens":3}`))
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, string(text))
}

// Whoever reads the request log from stdout may end before the proxy does.
func TestAClosedStdoutEndsNothing(t *testing.T) {
	flags, _, _ := cluster(t, time.Millisecond)
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	proxy := startTo(t, writer,
		append([]string{"serve", "--admin", "127.0.0.1:0", "--host", "127.0.0.1", "--port", "0", "--no-self-test", "--request-log", "-"},
			flags...)...)
	require.NoError(t, writer.Close()) // the proxy has its own
	lines := bufio.NewReader(reader)
	proxy.whole(t)
	line, err := lines.ReadBytes('\n')
	require.NoError(t, err)
	require.True(t, json.Valid(line), string(line))

	require.NoError(t, reader.Close())
	for range 3 {
		proxy.whole(t)
	}
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 0, proxy.wait(t))
	require.Equal(t, 1, strings.Count(proxy.log(), "the request log cannot be written"), "said once:\n%s", proxy.log())
}

// The log goes to a named pipe, whose reader leaves and comes back.
func TestAClosedStderrEndsNothing(t *testing.T) {
	flags, _, _ := cluster(t, time.Millisecond)
	fifo := filepath.Join(t.TempDir(), "log")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	open := func() (*os.File, *bufio.Reader) {
		f, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		require.NoError(t, err)
		require.NoError(t, f.SetReadDeadline(time.Now().Add(patience)))
		return f, bufio.NewReader(f)
	}
	reader, lines := open()
	writer, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0],
		append([]string{"serve", "--admin", "127.0.0.1:0", "--host", "127.0.0.1", "--port", "0", "--no-self-test"}, flags...)...)
	cmd.Env = append(os.Environ(), asEvenkeel+"=1", engineKeyEnv+"=")
	cmd.Stderr = writer
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	require.NoError(t, writer.Close())

	next := func(msg string) string {
		for {
			line, err := lines.ReadString('\n')
			require.NoError(t, err, "waiting for %q", msg)
			if strings.Contains(line, `"msg":"`+msg) {
				return line
			}
		}
	}
	var listening struct{ Public, Admin string }
	require.NoError(t, json.Unmarshal([]byte(next("listening")), &listening))
	proxy := &process{cmd: cmd, exited: make(chan error, 1), public: "http://" + listening.Public, admin: "http://" + listening.Admin,
		client: &http.Client{Timeout: patience}}
	go func() { proxy.exited <- cmd.Wait() }()
	require.Eventually(t, func() bool { status, _ := proxy.get(proxy.admin + "/readyz"); return status == http.StatusOK }, patience,
		5*time.Millisecond)

	require.NoError(t, reader.Close())
	policy := func(name string) { // each is a line of the log
		request, err := http.NewRequest(http.MethodPut, proxy.admin+"/policy", strings.NewReader(fmt.Sprintf(`{"policy":%q}`, name)))
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/json")
		resp, err := proxy.client.Do(request)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
	}
	policy("jsq")
	policy("br0")
	proxy.whole(t)

	reader, lines = open()
	defer reader.Close()
	policy("rr")
	require.Contains(t, next("an operator changed the policy"), `"to":"rr"`)
	var told struct {
		Lost  int `json:"lines_lost"`
		Error string
	}
	require.NoError(t, json.Unmarshal([]byte(next("log lines before this one could not be written")), &told))
	require.GreaterOrEqual(t, told.Lost, 2)
	require.Contains(t, told.Error, "broken pipe")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	next("the proxy has ended: every request had finished")
	require.Equal(t, 0, proxy.wait(t))
}

func TestLostLinesAreCountedOnce(t *testing.T) {
	var out bytes.Buffer
	broken := true
	o := &logOutput{enc: logEncoder(false), out: writerFunc(func(p []byte) (int, error) {
		if broken {
			return 0, syscall.ENOSPC
		}
		return out.Write(p)
	})}
	for range 5 {
		_, err := o.Write([]byte("lost\n"))
		require.ErrorIs(t, err, syscall.ENOSPC)
	}
	broken = false
	for range 2 {
		_, err := o.Write([]byte("kept\n"))
		require.NoError(t, err)
	}
	require.Equal(t, 1, strings.Count(out.String(), `"lines_lost":5`), out.String())
	require.Equal(t, 2, strings.Count(out.String(), "kept\n"))
	require.Contains(t, out.String(), syscall.ENOSPC.Error())
}

// A terminal shows a log to people; whatever reads a file or a pipe gets JSON.
func TestTheLogOfATerminalIsForPeople(t *testing.T) {
	require.False(t, isTerminal(&bytes.Buffer{}))
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	defer reader.Close()
	defer writer.Close()
	require.False(t, isTerminal(writer))
	entry := zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Message: "an engine is down",
		Caller: zapcore.NewEntryCaller(0, "watch.go", 7, true)}
	fields := []zapcore.Field{zap.String("engine", "d0:8200"), zap.Duration("after", 1500*time.Millisecond)}
	for _, tt := range []struct {
		name      string
		forPeople bool
		want      string
	}{
		{"a terminal", true, "03:04:05.006  WARN  an engine is down  {\"engine\": \"d0:8200\", \"after\": \"1.5s\"}\n"},
		{"anything else", false, `{"level":"warn","ts":"2026-01-02T03:04:05.006Z","caller":"watch.go:7","msg":"an engine is down","engine":"d0:8200","after":1.5}` + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			line, err := logEncoder(tt.forPeople).EncodeEntry(entry, fields)
			require.NoError(t, err)
			require.Equal(t, tt.want, line.String())
		})
	}
}
