package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"evenkeel/bench/process"
)

// proxy is a process under measurement.
type proxy struct {
	name string
	url  string
	cmd  *exec.Cmd
	log  *bytes.Buffer
	dir  string
	pids func() []int // that do the work
}

const (
	evenkeelName = "evenkeel"
	bareName     = "net/http"
	nginxName    = "nginx"
)

// start builds and starts every proxy there is.
func start(ctx context.Context, o options, prefillURL string, decodeURLs []string) (list []*proxy, err error) {
	dir, err := os.MkdirTemp("", "evenkeel-relay-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			for _, p := range list {
				p.stop()
			}
			_ = os.RemoveAll(dir)
		}
	}()
	bin, err := process.Evenkeel(ctx, "", dir)
	if err != nil {
		return nil, err
	}
	port, admin := process.FreePort(), process.FreePort()
	args := []string{"serve", "--host", "127.0.0.1", "--port", port, "--admin", "127.0.0.1:" + admin, "--log-level", "warn",
		"--slots", strconv.Itoa((o.streams + len(decodeURLs) - 1) / len(decodeURLs))}
	ph, pp, err := hostsAndPorts([]string{prefillURL})
	if err != nil {
		return nil, err
	}
	dh, dp, err := hostsAndPorts(decodeURLs)
	if err != nil {
		return nil, err
	}
	for _, l := range []struct {
		flag  string
		words []string
	}{{"--prefiller-hosts", ph}, {"--prefiller-ports", pp}, {"--decoder-hosts", dh}, {"--decoder-ports", dp}} {
		args = append(append(args, l.flag), l.words...)
	}
	for _, c := range []struct {
		name, port, ready string
		cmd               *exec.Cmd
	}{
		{evenkeelName, port, "http://127.0.0.1:" + admin + "/readyz", exec.Command(bin, args...)},
		{bareName, "", "", nil},
		{nginxName, "", "", nil},
	} {
		switch c.name {
		case bareName:
			c.port = process.FreePort()
			c.cmd = exec.Command(os.Args[0], append([]string{"bare-proxy", "127.0.0.1:" + c.port}, decodeURLs...)...)
		case nginxName:
			path, lookErr := exec.LookPath("nginx")
			if lookErr != nil {
				fmt.Println("nginx is not installed: left out")
				continue
			}
			c.port = process.FreePort()
			conf, confErr := nginxConfig(dir, c.port, decodeURLs)
			if confErr != nil {
				return list, confErr
			}
			c.cmd = exec.Command(path, "-c", conf, "-p", dir)
		}
		if c.ready == "" {
			c.ready = "http://127.0.0.1:" + c.port + "/health"
		}
		p := &proxy{name: c.name, url: "http://127.0.0.1:" + c.port, cmd: c.cmd, log: &bytes.Buffer{}, dir: dir}
		p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
		if err := p.cmd.Start(); err != nil {
			return list, err
		}
		list = append(list, p)
		p.pids = func() []int { return append(children(p.cmd.Process.Pid), p.cmd.Process.Pid) }
		if err := awaitReady(p, c.ready); err != nil {
			return list, err
		}
	}
	return list, nil
}

func (p *proxy) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
	_ = os.RemoveAll(p.dir)
}

func awaitReady(p *proxy, ready string) error {
	for range 200 {
		resp, err := http.Get(ready)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("%s is not ready: %s", p.name, p.log)
}

// bareProxy is what net/http gives: ReverseProxy, flushing at once, round robin.
func bareProxy(listen string, engines []string) error {
	targets := make([]*url.URL, len(engines))
	for i, e := range engines {
		u, err := url.Parse(e)
		if err != nil {
			return err
		}
		targets[i] = u
	}
	var next atomic.Uint64
	rp := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(targets[next.Add(1)%uint64(len(targets))]) },
		FlushInterval: -1,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1024, IdleConnTimeout: 4 * time.Second},
	}
	server := &http.Server{Addr: listen, Handler: rp, ReadHeaderTimeout: 10 * time.Second}
	return server.ListenAndServe()
}

func nginxConfig(dir, port string, engines []string) (string, error) {
	var b strings.Builder
	b.WriteString("daemon off;\nworker_processes 1;\nerror_log stderr error;\npid nginx.pid;\nevents { worker_connections 8192; }\nhttp {\n  access_log off;\n  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;\n  upstream engines {\n    keepalive 1024;\n")
	for _, e := range engines {
		fmt.Fprintf(&b, "    server %s;\n", strings.TrimPrefix(e, "http://"))
	}
	fmt.Fprintf(&b, "  }\n  server {\n    listen 127.0.0.1:%s;\n    client_max_body_size 32m;\n    location / {\n      proxy_pass http://engines;\n      proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n      proxy_buffering off;\n      proxy_read_timeout 300s;\n    }\n  }\n}\n", port)
	path := filepath.Join(dir, "nginx.conf")
	return path, os.WriteFile(path, []byte(b.String()), 0o600)
}

func hostsAndPorts(urls []string) (hosts, ports []string, err error) {
	for _, u := range urls {
		h, p, err := net.SplitHostPort(strings.TrimPrefix(u, "http://"))
		if err != nil {
			return nil, nil, err
		}
		hosts, ports = append(hosts, h), append(ports, p)
	}
	return hosts, ports, nil
}

// children are the processes whose parent is pid: nginx's workers.
func children(pid int) (list []int) {
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(text)) {
			if n, err := strconv.Atoi(f); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}
