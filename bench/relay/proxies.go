package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"evenkeel/bench/world"
)

// proxy is a process under measurement.
type proxy struct {
	name string
	url  string
	pids func() []int // that do the work
}

const (
	evenkeelName = "evenkeel"
	bareName     = "net/http"
	nginxName    = "nginx"
)

// start starts every proxy there is.
func start(ctx context.Context, w *world.World, o options, prefill, decode []string) (list []*proxy, err error) {
	own := w.Proxies(evenkeelName)[0]
	if err := own.ServeWith(ctx, fmt.Sprintf("listen: %q\nadmin: {listen: %q}\nself_test: false\n", own.Clients, own.Address)+
		world.Engines(world.EnginesAt(prefill, ""), world.EnginesAt(decode, ", slots: %d", o.slots())), "--log-level", "warn"); err != nil {
		return nil, err
	}
	add := func(name, address string, p *world.Process) {
		list = append(list, &proxy{name, "http://" + address, func() []int { return append(children(p.Pid), p.Pid) }})
	}
	add(evenkeelName, own.Clients, own.Process)
	free := world.FreeAddresses(2)
	others := map[string]*exec.Cmd{bareName: exec.Command(os.Args[0], append([]string{"bare-proxy", free[0]}, decode...)...)}
	if path, err := exec.LookPath("nginx"); err != nil {
		fmt.Println("nginx is not installed: left out")
	} else {
		if err := w.Write("nginx.conf", nginxConfig(free[1], decode)); err != nil {
			return nil, err
		}
		others[nginxName] = exec.Command(path, "-c", w.File("nginx.conf"), "-p", w.Dir)
	}
	for i, name := range []string{bareName, nginxName} {
		if others[name] == nil {
			continue
		}
		p, err := w.Start(filepath.Base(name), others[name])
		if err != nil {
			return nil, err
		}
		if err := p.Answers(ctx, 10*time.Second, "http://"+free[i]+"/health"); err != nil {
			return nil, err
		}
		add(name, free[i], p)
	}
	return list, nil
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

// nginxConfig passes requests on to the engines in turn.
func nginxConfig(listen string, engines []string) string {
	servers := ""
	for _, e := range engines {
		servers += fmt.Sprintf("    server %s;\n", strings.TrimPrefix(e, "http://"))
	}
	return fmt.Sprintf(`daemon off;
worker_processes 1;
error_log stderr error;
pid nginx.pid;
events { worker_connections 8192; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream engines {
    keepalive 1024;
%s  }
  server {
    listen %s;
    client_max_body_size 32m;
    location / {
      proxy_pass http://engines;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }
  }
}
`, servers, listen)
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
