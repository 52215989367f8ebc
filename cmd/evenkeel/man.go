package main

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"github.com/alecthomas/kong"
)

// manCmd writes the manual page. It uses the help texts of the commands, so that the page cannot
// differ from --help.
type manCmd struct{}

// Run writes the page to stdout, in the roff format.
func (manCmd) Run(ctx *kong.Context, std streams) error {
	var b bytes.Buffer
	root := ctx.Model.Node
	v, _ := buildInfo()
	fmt.Fprintf(&b, ".TH EVENKEEL 1 \"\" \"evenkeel %s\" \"User Commands\"\n", escapeRoff(v))
	fmt.Fprintf(&b, ".SH NAME\nevenkeel \\- proxy between prefill and decode engines\n")
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B evenkeel\n.I command\n[\\fIflags\\fR]\n")
	fmt.Fprintf(&b, ".SH DESCRIPTION\n%s\n", escapeRoff(root.Help))
	b.WriteString(".SH COMMANDS\n")
	for _, c := range root.Leaves(true) {
		writeManSection(&b, c)
	}
	b.WriteString(".SH EXIT STATUS\n0: the command did its work. 1: the work failed. 2: the command line is wrong.\n")
	b.WriteString(".SH FILES\n.TP\n.I /etc/evenkeel/evenkeel.yaml\nThe configuration that the service of the packages reads.\n")
	_, err := b.WriteTo(std.out)
	return err
}

// writeManSection writes the section of one command, with its arguments and flags that are not
// hidden.
func writeManSection(b *bytes.Buffer, c *kong.Node) {
	fmt.Fprintf(b, ".SS \"%s\"\n%s\n", escapeRoff(c.Summary()), escapeRoff(c.Help))
	if c.Detail != "" {
		fmt.Fprintf(b, ".PP\n%s\n", indentedLines.ReplaceAllString(escapeRoff(c.Detail)+"\n", ".nf\n$0.fi\n"))
	}
	for _, p := range c.Positional {
		fmt.Fprintf(b, ".TP\n.I %s\n%s\n", escapeRoff(p.Name), escapeRoff(p.Help))
	}
	for _, f := range c.Flags {
		if f.Hidden || f.Name == "help" {
			continue
		}
		fmt.Fprintf(b, ".TP\n.B %s\n%s\n", escapeRoff(f.String()), escapeRoff(f.Help))
	}
}

// indentedLines matches lines that begin with a space, such as examples, whose line breaks must
// stay.
var indentedLines = regexp.MustCompile(`(?m)(^ .*\n)+`)

// escapeRoff escapes a text so that the formatter of manual pages shows it unchanged.
func escapeRoff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, `-`, `\-`).Replace(strings.TrimSpace(text))
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") { // the formatter would take the line for a command
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}
