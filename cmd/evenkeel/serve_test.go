package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
)

// patience bounds every wait of these tests; none of them waits for it.
const patience = time.Minute

// process is a proxy of its own process, in front of reference engines.
type process struct {
	cmd           *exec.Cmd
	exited        chan error
	public, admin string
	client        *http.Client // every request on a connection of its own

	mu    sync.Mutex
	lines []string
}

// serve starts `evenkeel serve` and waits until it is ready.
func serve(t *testing.T, args ...string) *process {
	t.Helper()
	return launch(t, append([]string{"--host", "127.0.0.1", "--port", "0"}, args...)...)
}

// serveFile is serve with a config file.
func serveFile(t *testing.T, file string) *process {
	t.Helper()
	return launch(t, "--config", file)
}

func launch(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, append([]string{"serve", "--admin", "127.0.0.1:0"}, args...)...)
}

// start runs the words of a whole command line.
func start(t *testing.T, words ...string) *process {
	t.Helper()
	return startTo(t, nil, words...)
}

// startTo is start with a stdout.
func startTo(t *testing.T, stdout *os.File, words ...string) *process {
	t.Helper()
	p := &process{exited: make(chan error, 1), client: &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}}
	p.cmd = exec.Command(os.Args[0], words...)
	p.cmd.Env = append(os.Environ(), asEvenkeel+"=1", engineKeyEnv+"=")
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	stderr, err := p.cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, s.Text())
			p.mu.Unlock()
		}
	}()
	go func() { <-read; p.exited <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		if t.Failed() {
			t.Log(p.log())
		}
	})
	var listening struct{ Public, Admin string }
	require.Eventually(t, func() bool {
		at := strings.Index(p.log(), `"msg":"listening"`)
		return at >= 0 && json.Unmarshal([]byte(p.find("listening")), &listening) == nil
	}, patience, 5*time.Millisecond)
	p.public, p.admin = "http://"+listening.Public, "http://"+listening.Admin
	require.Eventually(t, func() bool { status, _ := p.get(p.admin + "/readyz"); return status == http.StatusOK }, patience,
		5*time.Millisecond)
	return p
}

func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// find is the first log line with a message, empty when there is none yet.
func (p *process) find(msg string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lines {
		if strings.Contains(l, `"msg":"`+msg) {
			return l
		}
	}
	return ""
}

func (p *process) get(url string) (status int, body string) {
	resp, err := p.client.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// wait is the exit status.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	select {
	case err := <-p.exited:
		var exit *exec.ExitError
		if err != nil {
			require.ErrorAs(t, err, &exit)
			return exit.ExitCode()
		}
		return 0
	case <-time.After(patience):
		t.Fatal("evenkeel does not end")
		return -1
	}
}

// cluster is one prefill engine and a group of two decode ranks, as flags.
func cluster(t *testing.T, step time.Duration) (flags []string, p, d *refengine.Engine) {
	t.Helper()
	start := func(c refengine.Config) *refengine.Engine {
		c.Steps.C0, c.Prompts.Base, c.Answers.PromptTokensDetails = step, time.Millisecond, true
		e, err := refengine.Start(c)
		require.NoError(t, err)
		t.Cleanup(e.Close)
		return e
	}
	p, d = start(refengine.Config{Role: refengine.Prefill}), start(refengine.Config{Role: refengine.Decode, DPSize: 2, Slots: 4})
	list := func(side string, e *refengine.Engine) {
		var hosts, ports []string
		for _, u := range e.URLs() {
			host, port, err := net.SplitHostPort(strings.TrimPrefix(u, "http://"))
			require.NoError(t, err)
			hosts, ports = append(hosts, host), append(ports, port)
		}
		flags = append(append(append(flags, "--"+side+"-hosts"), hosts...), "--"+side+"-ports")
		flags = append(flags, ports...)
	}
	list("prefiller", p)
	list("decoder", d)
	return append(flags, "--slots", "4"), p, d
}

// stream opens a stream of a number of tokens and returns once it has begun.
func (p *process) stream(t *testing.T, prompt string, tokens int) *bufio.Reader {
	t.Helper()
	body := `{"model":"ref","prompt":` + strconv.Quote(prompt) + `,"stream":true,"ignore_eos":true,"max_tokens":` + strconv.Itoa(tokens) + `}`
	resp, err := p.client.Post(p.public+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	t.Cleanup(func() { _ = resp.Body.Close() })
	require.Equal(t, http.StatusOK, resp.StatusCode)
	r := bufio.NewReader(resp.Body)
	first, err := r.Peek(6)
	require.NoError(t, err)
	require.Equal(t, "data: ", string(first))
	return r
}

// text is what the events of a stream say together.
func text(t *testing.T, events []byte) (said string) {
	t.Helper()
	for event := range bytes.SplitSeq(events, []byte("\n\n")) {
		data, ok := bytes.CutPrefix(event, []byte("data: "))
		if !ok || string(data) == "[DONE]" {
			continue
		}
		var chunk struct{ Choices []struct{ Text string } }
		require.NoError(t, json.Unmarshal(data, &chunk), string(data))
		for _, c := range chunk.Choices {
			said += c.Text
		}
	}
	return said
}

func TestServeDrainsOnSIGTERM(t *testing.T) {
	flags, engineP, engineD := cluster(t, 5*time.Millisecond)
	proxy := serve(t, flags...)

	prompt := reftext.MakePrompt(1, 40)
	resp, err := proxy.client.Post(proxy.public+"/v1/completions", "application/json",
		strings.NewReader(`{"model":"ref","prompt":`+strconv.Quote(prompt)+`,"max_tokens":5}`))
	require.NoError(t, err)
	defer resp.Body.Close()
	var answer struct {
		Choices []struct{ Text string }
		Usage   struct {
			Completion int `json:"completion_tokens"`
		}
	}
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, reftext.Text(reftext.Of(prompt).Key, 5), answer.Choices[0].Text)
	require.Equal(t, 5, answer.Usage.Completion)

	require.Eventually(t, func() bool { return proxy.find("the self-test is done") != "" }, patience, 5*time.Millisecond,
		"the engines are tested once they are up")
	require.Contains(t, proxy.find("the self-test is done"), `"ok":6,"warnings":0,"bad":0`)

	const tokens = 500 // 2.5 s
	prompt = reftext.MakePrompt(2, 40)
	stream := proxy.stream(t, prompt, tokens)
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool {
		status, why := proxy.get(proxy.admin + "/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(why, "draining")
	}, patience, time.Millisecond, "a load balancer is told first")
	status, _ := proxy.get(proxy.public + "/v1/models")
	require.Equal(t, http.StatusOK, status, "it may not know yet")
	require.Eventually(t, func() bool {
		status, _ := proxy.get(proxy.public + "/v1/models")
		return status == 0
	}, patience, time.Millisecond, "nothing new is taken")
	rest, err := io.ReadAll(stream)
	require.NoError(t, err)
	require.True(t, bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")), "the stream ends as if nothing had happened")
	require.Equal(t, reftext.Text(reftext.Of(prompt).Key, tokens), text(t, rest))
	require.Equal(t, 0, proxy.wait(t))
	require.NotEmpty(t, proxy.find("draining"))
	require.NotEmpty(t, proxy.find("the proxy has ended: every request had finished"), "the last line says how it ended")

	require.Eventually(t, func() bool { return engineP.Stats().Pins == 0 }, patience, 5*time.Millisecond)
	p, d := engineP.Stats(), engineD.Stats()
	require.Zero(t, p.Leaks+p.Replays+p.ExpiredPulls+d.Aborted+d.Unknown+d.KeyMismatches+d.LocalPrefills)
}

func TestASecondSignalEndsServeAtOnce(t *testing.T) {
	flags, _, engineD := cluster(t, 10*time.Millisecond)
	proxy := serve(t, append(flags, "--no-self-test")...)
	stream := proxy.stream(t, reftext.MakePrompt(3, 40), 50_000) // 500 s
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { return proxy.find("draining") != "" }, patience, 5*time.Millisecond)
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGINT))
	require.Equal(t, 1, proxy.wait(t), "what was cut is not a clean end")
	rest, _ := io.ReadAll(stream)
	require.NotContains(t, string(rest), `"finish_reason":"`, "a cut stream does not look whole")
	require.NotEmpty(t, proxy.find("the proxy ends at once"))
	require.NotEmpty(t, proxy.find("the proxy has ended, but some requests or parts of it had not finished"))
	require.Contains(t, proxy.log(), "requests had not finished")
	require.Empty(t, proxy.find("self-test"))
	require.Eventually(t, func() bool { return engineD.Stats().Running == 0 }, patience, 5*time.Millisecond, "the engine is not left decoding")
}

func TestServeEndsWhileNoEngineIsUp(t *testing.T) {
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(nobody.Addr().String())
	require.NoError(t, err)
	require.NoError(t, nobody.Close())
	cmd := exec.Command(os.Args[0], "serve", "--port", "0", "--admin", "127.0.0.1:0", "--prefiller-ports", port, "--decoder-ports", port)
	cmd.Env = append(os.Environ(), asEvenkeel+"=1")
	var log bytes.Buffer
	pipe, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	for s := bufio.NewScanner(io.TeeReader(pipe, &log)); s.Scan(); {
		if strings.Contains(s.Text(), `"msg":"listening"`) {
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		}
	}
	require.NoError(t, cmd.Wait(), log.String())
}

func TestTwoProxiesCannotHaveOneAddress(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	_, port, err := net.SplitHostPort(taken.Addr().String())
	require.NoError(t, err)
	out, err := exec.Command("env", asEvenkeel+"=1", os.Args[0], "serve", "--host", "127.0.0.1", "--port", port, "--admin",
		"127.0.0.1:0").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "another process on 127.0.0.1:"+port)
}

func TestSIGHUPReadsTheConfigAgain(t *testing.T) {
	_, engineP, engineD := cluster(t, time.Millisecond)
	text := func(more string) string {
		return "listen: \"127.0.0.1:0\"\nself_test: false\nlimits: {drain_grace: 0s}\nengines: {prefill: [{url: " +
			strconv.Quote(engineP.URLs()[0]) + "}], decode: [{url: " + strconv.Quote(engineD.URLs()[0]) + ", slots: 4}]}\n" + more
	}
	file := write(t, text(""))
	proxy := serveFile(t, file)
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return proxy.find("the config file was read again, and nothing in it has changed") != "" }, patience,
		5*time.Millisecond)
	require.NoError(t, os.WriteFile(file, []byte(text("pool: {size: 7}\n")), 0o600))
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool {
		return strings.Contains(proxy.find("the new config is in force now"), "pool.size: 1024 -> 7")
	}, patience, 5*time.Millisecond)
	_, status := proxy.get(proxy.admin + "/status")
	require.Contains(t, status, `"pool_places": 7`)
	require.NoError(t, proxy.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 0, proxy.wait(t))
}

// A disk that does not answer holds a reload up. The proxy must still end when it is told to.
func TestAReloadThatHangsDoesNotKeepTheProxyFromEnding(t *testing.T) {
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	require.NoError(t, cfg.Validate())
	g, err := gateway.New(cfg, zap.NewNop())
	require.NoError(t, err)
	began, answers := make(chan struct{}), make(chan struct{})
	g.Reloader().SetSource(filepath.Join(t.TempDir(), "evenkeel.yaml"), func() (*config.Config, error) {
		close(began)
		<-answers
		return nil, errors.New("the disk answers too late")
	})
	handler, err := admin.New(g, admin.Options{Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, g.Start(handler))
	defer func() { require.NoError(t, g.Shutdown(t.Context())) }()
	defer close(answers)

	signals, reloads, ended := make(chan os.Signal, 1), make(chan os.Signal, 1), make(chan os.Signal, 1)
	go func() { ended <- reloadUntilSignal(signals, reloads, g, zap.NewNop()) }()
	reloads <- syscall.SIGHUP
	<-began
	signals <- syscall.SIGTERM
	select {
	case s := <-ended:
		require.Equal(t, syscall.SIGTERM, s)
	case <-time.After(patience):
		t.Fatal("the proxy waits for the reload")
	}
}
