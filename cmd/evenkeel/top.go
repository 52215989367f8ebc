package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"

	"golang.org/x/term"

	"evenkeel/gateway/top"
)

// topCmd shows a running proxy in a terminal.
type topCmd struct {
	Admin     string `default:"http://127.0.0.1:9090" placeholder:"URL" help:"Read from this admin listener of the proxy (default: ${default})."`
	TokenFile string `placeholder:"FILE" help:"Read the listener's token from FILE, which is admin.token_file of its config."`
	Once      bool   `help:"Print the present state once, without colours, and end."`
}

// Help is the page of `evenkeel top --help`.
func (topCmd) Help() string {
	return `top shows the ranks' KV load, the pool, the prefill engines, the engines that are out of service and why, and the last decisions, anew every second. It works over ssh and in 80 columns; ? lists its keys.

    evenkeel top
    evenkeel top --admin http://10.0.0.9:9090 --token-file /etc/evenkeel/admin-token
    evenkeel top --once | head -3

If the listener has a certificate of your own authority: SSL_CERT_FILE=ca.pem evenkeel top --admin https://HOST:9090`
}

func (c topCmd) Run(std streams) error {
	s := &top.Source{URL: c.Admin, Client: http.DefaultClient}
	if !strings.Contains(s.URL, "://") {
		s.URL = "http://" + s.URL
	}
	if c.TokenFile != "" {
		text, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return fmt.Errorf("--token-file: %w", err)
		}
		s.Token = string(bytes.TrimSpace(text))
	}
	file, ok := std.out.(*os.File)
	screen := ok && term.IsTerminal(int(file.Fd()))
	if c.Once || !screen {
		d, err := s.Once(context.Background())
		if err != nil {
			return err
		}
		width := 100
		if screen {
			if w, _, err := term.GetSize(int(file.Fd())); err == nil {
				width = w
			}
		}
		_, err = fmt.Fprint(std.out, top.Once(d, width))
		return err
	}
	return top.Run(context.Background(), s)
}
