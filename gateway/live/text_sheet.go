package live

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// sheet is a page of text. No line is wider than width columns, and none has control characters for
// a terminal.
type sheet struct {
	width int
	lines []string
}

// linesOfAText is how many lines a sentence or a command may take.
const linesOfAText = 8

// row adds one line, cut to the width of the sheet.
func (s *sheet) row(format string, args ...any) {
	line := clean(fmt.Sprintf(format, args...))
	if columns(line) > s.width {
		line = cutToWidth(line, s.width-1) + "…"
	}
	s.lines = append(s.lines, strings.TrimRight(line, " "))
}

// paragraph adds sentences, wrapped into at most linesOfAText lines. indent is in columns; all
// lines but the first have two columns more.
func (s *sheet) paragraph(indent int, text string) {
	for i, line := range wrap(strings.Fields(clean(text)), s.width-indent-2) {
		s.lines = append(s.lines, strings.Repeat(" ", indent+2*min(i, 1))+line)
	}
}

// command adds a shell command, wrapped with backslashes, so that the lines can be copied and run.
// It breaks lines at a space outside of quotes if there is one, and else inside a word. A command
// of more than linesOfAText lines is cut off after them. A line with … follows, and the command
// cannot be run.
func (s *sheet) command(command string) {
	command = clean(command)
	quote := rune(0) // the quote that is open where the line begins; 0: none
	for range linesOfAText {
		if columns(command) <= s.width {
			s.lines = append(s.lines, command)
			return
		}
		end, open := breakAt(command, s.width-2, quote) // two columns stay free for a quote and the backslash
		line, next := command[:end]+`\`, command[end:]
		if open == '\'' { // a backslash has no effect between single quotes, so the quotes are closed before it, and opened again after it
			line, next, open = command[:end]+`'\`, "'"+next, 0
		}
		s.lines = append(s.lines, line)
		command, quote = next, open
	}
	s.row("…") // the rest of the command is left out
}

// breakAt returns the index at which the first line of a command ends, and the quote that is open
// there (0: none). The command must be wider than width columns, which is the most that its first
// line may have. The line ends after its last space outside of quotes; if it has none, after the
// last character that fits. quote is the quote that is open where the command begins; 0: none.
func breakAt(command string, width int, quote rune) (end int, open rune) {
	used, afterSpace := 0, 0 // columns so far; index after the last space outside of quotes, 0: there is none
	open = quote
	for i, r := range command {
		if used += columnsOf(r); used > width {
			break
		}
		end = i + utf8.RuneLen(r)
		switch {
		case r == open: // the open quote ends
			open = 0
		case open == 0 && (r == '\'' || r == '"'):
			open = r
		case open == 0 && r == ' ':
			afterSpace = end
		}
	}
	if afterSpace > 0 {
		return afterSpace, 0
	}
	return end, open
}

// clean replaces control characters, because names of models, engines and requests come from
// outside and could steer the terminal.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r): // control characters, and those that change the direction of text
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// columns is an upper bound of a text's width in columns. Some characters take two columns. Instead
// of a table of them, every character outside of the ranges that this page itself draws counts as
// two. If the text is really narrower, only some room is left.
func columns(text string) (n int) {
	for _, r := range text {
		n += columnsOf(r)
	}
	return n
}

// columnsOf is an upper bound of a character's width in columns (see columns). These characters
// have one column: the scripts below 0x1100, such as Latin, Greek and Cyrillic; the dashes, quotes
// and dots of 0x2010 to 0x2027; arrows; and the blocks that bars are drawn with.
func columnsOf(r rune) int {
	if r < 0x1100 || r >= 0x2010 && r <= 0x2027 || r >= 0x2190 && r <= 0x21ff || r >= 0x2580 && r <= 0x259f {
		return 1
	}
	return 2
}

// cutToWidth returns the beginning of a text, at most width columns.
func cutToWidth(text string, width int) string {
	for i, r := range text {
		if width -= columnsOf(r); width < 0 {
			return text[:i]
		}
	}
	return text
}

// tail returns the end of a name, at most width columns, because names of engines differ at their
// end.
func tail(name string, width int) string {
	name = clean(name)
	if columns(name) <= width {
		return name
	}
	runes := []rune(name)
	// One column stays free for the sign that the beginning is left out.
	for runes = runes[max(0, len(runes)-width):]; columns(string(runes)) >= width; {
		runes = runes[1:]
	}
	return "…" + string(runes)
}

// padRight appends spaces to a text up to a width in columns. A wider text stays as it is.
func padRight(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-columns(text)))
}

// wrap wraps words into at most linesOfAText lines, and breaks words that are wider than a line. If
// text is left out, the last line is "…".
func wrap(words []string, width int) (lines []string) {
	for len(words) > 0 {
		line, n := words[0], 1 // n: words in the line
		for n < len(words) && columns(line)+1+columns(words[n]) <= width {
			line += " " + words[n]
			n++
		}
		head := cutToWidth(line, width)
		if head != line { // only a line of one word can be too wide
			words[0] = line[len(head):]
		} else {
			words = words[n:]
		}
		if len(words) > 0 && len(lines) == linesOfAText-1 {
			return append(lines, "…")
		}
		lines = append(lines, head)
	}
	return lines
}
