package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/term"

	"evenkeel/gateway/top"
)

// topCmd shows the state of a running proxy in a terminal, as text from the proxy's admin listener.
type topCmd struct {
	Admin     string `default:"http://127.0.0.1:9090" placeholder:"URL" help:"Read from this admin listener of the proxy (default: ${default})."`
	TokenFile string `placeholder:"FILE" help:"Read the listener's token from FILE, which is admin.token_file of its config."`
	Once      bool   `help:"Print the present state once, and end."`
}

// Help returns the text that `top --help` prints below its first line.
func (topCmd) Help() string {
	return `top prints the state of a proxy once per second: incidents with what to do, what clients get, the KV load of each rank, the pool, the prefill engines, the engines that are out of service and why, and the last decisions. It works over ssh and in 80 columns. Ctrl-C ends it. If its output is no terminal, it prints the state once and ends.

    evenkeel top
    evenkeel top --admin http://10.0.0.9:9090 --token-file /etc/evenkeel/admin-token
    evenkeel top --once | head -3

The proxy itself writes this text, so a host without evenkeel shows the same:

    watch -t -n1 -x curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/live?once&text"

If the listener has a certificate of your own authority: SSL_CERT_FILE=ca.pem evenkeel top --admin https://HOST:9090`
}

// Run shows the state once per second if stdout is a terminal. Otherwise, or with --once, it prints
// the state once.
func (c topCmd) Run(std streams) error {
	if !strings.Contains(c.Admin, "://") {
		c.Admin = "http://" + c.Admin
	}
	token := ""
	if c.TokenFile != "" {
		text, err := os.ReadFile(c.TokenFile)
		if err != nil {
			return fmt.Errorf("--token-file: %w", err)
		}
		token = string(bytes.TrimSpace(text))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	source := top.NewSource(c.Admin, token)
	// size returns the columns and lines that the text may fill. Height 0 is no limit, for an output
	// that is no terminal.
	size := func() (width, height int) { return 100, 0 }
	file, ok := std.out.(*os.File)
	toTerminal := ok && term.IsTerminal(int(file.Fd()))
	if toTerminal {
		size = func() (width, height int) {
			width, height, _ = term.GetSize(int(file.Fd())) // both are 0 if the terminal does not tell its size
			return cmp.Or(width, 80), cmp.Or(height, 24)
		}
	}
	if toTerminal && !c.Once {
		return top.Run(ctx, source, file, size)
	}
	width, _ := size()
	page, err := source.Page(ctx, width)
	if err != nil {
		return err
	}
	_, err = io.WriteString(std.out, page)
	return err
}
