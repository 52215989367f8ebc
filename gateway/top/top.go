// Package top shows the state of a running proxy in a terminal. It prints the text page of the
// proxy's admin listener.
package top

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"
)

// Source is the admin listener of a proxy.
type Source struct {
	URL    string
	Token  string // the token in admin.token_file; empty: the listener needs none
	Client *http.Client
}

const (
	requestTimeout = 3 * time.Second
	maxPageBytes   = 1 << 20 // bytes of a page, which has 200 lines of at most 400 columns

	leastWidth, mostWidth = 40, 400 // least and most columns that the listener accepts
)

// NewSource returns a Source that follows no redirects, because the token is meant for this
// listener only.
func NewSource(url, token string) *Source {
	noRedirects := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Source{URL: strings.TrimSuffix(url, "/"), Token: token, Client: &http.Client{Timeout: requestTimeout, CheckRedirect: noRedirects}}
}

// Page returns the state of the proxy in lines of this many columns, or of the nearest number that
// the listener accepts.
func (s *Source) Page(ctx context.Context, width int) (string, error) {
	path := fmt.Sprintf("/live?once&text&width=%d", max(leastWidth, min(mostWidth, width)))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path, nil)
	if err != nil {
		return "", err
	}
	if s.Token != "" {
		req.Header.Set("Authorization", "Bearer "+s.Token)
	}
	resp, err := s.Client.Do(req)
	if err != nil {
		if asked := (*url.Error)(nil); errors.As(err, &asked) {
			err = asked.Err // the error without the address, which the text below has already
			if asked.Timeout() {
				err = fmt.Errorf("nothing came within %s", requestTimeout)
			}
		}
		return "", fmt.Errorf("%s does not answer: %w; --admin is the address of evenkeel's admin listener (admin.listen)", s.URL, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPageBytes+1))
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case err != nil:
		return "", fmt.Errorf("%s ended its answer too early: %w", s.URL, err)
	case resp.StatusCode == http.StatusUnauthorized && s.Token != "":
		return "", fmt.Errorf("%s has another token (admin.token_file) than the one in --token-file", s.URL)
	case resp.StatusCode == http.StatusUnauthorized:
		return "", fmt.Errorf("%s asks for its token (admin.token_file); name the file with --token-file", s.URL)
	case resp.StatusCode == http.StatusNotFound:
		return "", fmt.Errorf("%s has no %s; --admin is the address of evenkeel's admin listener (admin.listen)", s.URL, path)
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%s answers %s: %s", s.URL, resp.Status, bytes.TrimSpace(body[:min(512, len(body))]))
	case kind != "text/plain" || len(body) > maxPageBytes:
		return "", fmt.Errorf("%s has no page of text; --admin is the address of evenkeel's admin listener (admin.listen), of this version or a "+
			"later one", s.URL)
	}
	return printable(string(body)), nil
}

// printable replaces control characters except line ends, because a terminal would obey them.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// These escape sequences control the terminal. Lines that are too long are cut instead of wrapped.
// A line is cleared before it is written, because after a full line the cursor stays on the last
// character and would clear it.
const (
	cutLines   = "\x1b[?7l"
	wrapLines  = "\x1b[?7h\n"
	firstLine  = "\x1b[H\x1b[K"
	nextLine   = "\r\n\x1b[K"
	clearBelow = "\x1b[J" // clears from the cursor to the end of the screen
)

// Run prints the page once a second until ctx ends.
func Run(ctx context.Context, s *Source, out io.Writer, size func() (width, height int)) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	return runOn(ctx, s, out, size, tick.C)
}

// runOn prints the page at once and at each tick, until ctx ends. If the proxy does not answer, it
// prints the last page and the reason. An error means that out cannot be written.
func runOn(ctx context.Context, s *Source, out io.Writer, size func() (width, height int), tick <-chan time.Time) error {
	_, height := size()
	fmt.Fprint(out, cutLines, strings.Repeat("\n", height)) // moves what was on the screen up, so that it can be scrolled back to
	defer fmt.Fprint(out, wrapLines)
	var last screen
	for {
		width, height := size()
		page, err := s.Page(ctx, width)
		if ctx.Err() != nil {
			return nil
		}
		last.update(page, err, time.Now())
		lines := last.lines(width, height, time.Now())
		if len(lines) < height { // the last screen may have had more lines
			lines = append(lines, clearBelow)
		}
		if _, err := io.WriteString(out, firstLine+strings.Join(lines, nextLine)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		}
	}
}

// screen has the last page, and why there is no newer one.
type screen struct {
	page string
	at   time.Time // when page came; zero: no page has come yet
	err  error     // why the last request failed; nil: page is its answer
}

// update stores the outcome of a request to the proxy. After an error, the screen keeps its page.
func (s *screen) update(page string, err error, now time.Time) {
	s.err = err
	if err == nil {
		s.page, s.at = page, now
	}
}

// lines returns the page. If the last request failed, the reason comes before it. If it has more
// lines than the terminal (height; 0: not known), the last line says how many are missing.
func (s *screen) lines(width, height int, now time.Time) (all []string) {
	if s.err != nil {
		says := "There is no page yet; evenkeel top asks again every second: "
		if !s.at.IsZero() {
			says = fmt.Sprintf("OLD: this page is %.0f s old; evenkeel top asks again every second: ", now.Sub(s.at).Seconds())
		}
		says += printable(strings.ReplaceAll(s.err.Error(), "\n", " "))
		for runes := []rune(says); len(runes) > 0; { // wrapped to the width, so that nothing is cut off
			lineLength := min(max(1, width), len(runes))
			all, runes = append(all, string(runes[:lineLength])), runes[lineLength:]
		}
		all = append(all, "")
	}
	if s.page != "" {
		all = append(all, strings.Split(strings.TrimSuffix(s.page, "\n"), "\n")...)
	}
	if height > 0 && len(all) > height {
		missing := len(all) - (height - 1) // the last line of the terminal is for this text
		all = append(all[:height-1], fmt.Sprintf("%d more lines: use a higher terminal, or evenkeel top --once | less", missing))
	}
	return all
}
