package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTerminalPage(t *testing.T) {
	span := func(css, text string) string { return `<span style="` + css + `">` + text + `</span>` }
	for _, c := range []struct{ name, screen, want string }{
		{"text is text, whatever it says", "a <b> & c\n", span("", "a &lt;b&gt; &amp; c\n")},
		{"colours of the sixteen, until they are reset", "\x1b[31mred\x1b[39m\x1b[104mlight\x1b[0mplain", span("color:#e5646a;", "red") + span("background:#83c3ff;", "light") + span("", "plain")},
		{"colours of the 256, and true ones", "\x1b[38;5;16ma\x1b[38;5;231mb\x1b[38;5;232mc\x1b[48;2;1;2;3md", span("color:rgb(0,0,0);", "a") + span("color:rgb(255,255,255);", "b") + span("color:rgb(8,8,8);", "c") + span("color:rgb(8,8,8);background:rgb(1,2,3);", "d")},
		{"attributes add up and end one by one", "\x1b[1;4;3mx\x1b[22;23my\x1b[mz", span("font-weight:bold;font-style:italic;text-decoration:underline;", "x") + span("text-decoration:underline;", "y") + span("", "z")},
		{"inverted is the other way round", "\x1b[7mx\x1b[27;2my", span("color:#14181d;background:#d7dde4;", "x") + span("opacity:.6;", "y")},
		{"what is no colour changes nothing", "\x1b[2Ka\x1b[38mb\x1b[38;5;999mc\x1b[99999999999999999999md", span("", "a") + span("", "b") + span("", "c") + span("", "d")},
		{"a sequence that is cut ends the page", "a\x1b[3", span("", "a")},
	} {
		require.Equal(t, terminalHead+c.want+"</pre>\n", terminalPage(c.screen), c.name)
	}
}
