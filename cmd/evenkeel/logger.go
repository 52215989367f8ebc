package main

import (
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
)

// newLogger returns a logger that writes to out: readable lines if out is a terminal, and otherwise
// JSON lines. It does not drop lines by sampling, because an operator needs every line about a
// request that failed.
func newLogger(level string, out io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, err
	}
	enc := logEncoder(isTerminal(out))
	// logOutput has an encoder of its own for the one line that it makes itself: how many lines could
	// not be written.
	sink := &logOutput{out: out, enc: enc.Clone()}
	core := zapcore.NewCore(enc, zapcore.Lock(zapcore.AddSync(sink)), l)
	return zap.New(core, zap.AddCaller(), zap.AddStacktrace(zapcore.DPanicLevel)), nil
}

// logEncoder returns the encoder of log lines. A line for people has the time of day, the level,
// the message, and the fields as JSON.
func logEncoder(forPeople bool) zapcore.Encoder {
	cfg := zap.NewProductionEncoderConfig()
	if !forPeople {
		cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
		return zapcore.NewJSONEncoder(cfg)
	}
	cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	cfg.EncodeLevel = zapcore.CapitalLevelEncoder
	cfg.EncodeDuration = zapcore.StringDurationEncoder
	cfg.ConsoleSeparator = "  "
	cfg.CallerKey = ""
	return zapcore.NewConsoleEncoder(cfg)
}

// isTerminal says whether out is a terminal, which a person reads.
func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// logOutput writes log lines. It counts the lines that cannot be written, because the reader of a
// pipe has ended or a disk is full, and writes their number once writing works again.
type logOutput struct {
	out  io.Writer
	enc  zapcore.Encoder
	lost int   // lines that could not be written and whose number is not logged yet
	why  error // why the first of the lost lines could not be written
}

// Write writes one line. zap calls it under a lock.
func (o *logOutput) Write(line []byte) (int, error) {
	n, err := o.out.Write(line)
	switch {
	case err != nil:
		o.lost++
		if o.lost == 1 {
			o.why = err
		}
	case o.lost > 0:
		report, encErr := o.enc.EncodeEntry(zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(),
			Message: "log lines before this one could not be written and are lost"},
			[]zapcore.Field{zap.Int("lines_lost", o.lost), zap.Error(o.why)})
		if encErr != nil { // cannot happen with such plain values
			break
		}
		if _, err := o.out.Write(report.Bytes()); err == nil { // otherwise the next line reports them
			o.lost = 0
		}
		report.Free()
	}
	return n, err
}
